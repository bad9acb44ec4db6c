"""What every method is written in: a model, clients and their tasks, and a federation that asks cohorts of them."""

from unalike.core.client import Client as Client
from unalike.core.federation import Cohort as Cohort
from unalike.core.federation import Federation as Federation
from unalike.core.federation import Models as Models
from unalike.core.federation import Replies as Replies
from unalike.core.federation import each as each
from unalike.core.method import State as State
from unalike.core.model import Model as Model
from unalike.core.task import Sent as Sent
from unalike.core.task import Task as Task
from unalike.core.task import send as send
from unalike.core.task import task as task
