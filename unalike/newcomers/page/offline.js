// A service worker: after the first load the page works without a network. It asks the network first, so that a new
// model is taken up, and keeps the last answer. What is sent (POST) it never sees.

const KEPT = "unalike", PARTS = ["./", "page/style.css", "page/app.js", "page/onnx.js", "page/rows.js", "page/noise.js"];

async function answer(request) {
  const kept = await caches.open(KEPT);
  try {
    const fresh = await fetch(request);
    if (fresh.ok) await kept.put(request, fresh.clone());
    return fresh;
  } catch (error) {
    const found = await kept.match(request, { ignoreVary: true });
    if (!found) throw error;
    return found;
  }
}

const ours = (url) => url.startsWith(self.registration.scope) && /^($|page\/|v1\/)/.test(url.slice(self.registration.scope.length));

self.oninstall = (event) => event.waitUntil(caches.open(KEPT).then((kept) => kept.addAll(PARTS)).then(() => self.skipWaiting()));
self.onactivate = (event) => event.waitUntil(self.clients.claim());
self.onfetch = (event) => { if (event.request.method === "GET" && ours(event.request.url)) event.respondWith(answer(event.request)); };
