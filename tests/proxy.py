"""Between a run and its server, on a thread of its own: subclass it and override `handle`."""
import asyncio
import threading

import aiohttp
from aiohttp import web


class Proxy:
    """`with Proxy(target) as proxy:` listens at `proxy.url`; port 0: any that is free."""

    def __init__(self, target: str, port: int = 0):
        self.target, self.port = target, port

    async def handle(self, request: web.Request) -> web.StreamResponse:
        status, content, kind = await self.forward(request)
        return web.Response(body=content, status=status, content_type=kind)

    async def forward(self, request: web.Request) -> tuple[int, bytes, str]:
        """The server's status, body and content type. Raises aiohttp.ClientError."""
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self.session.request(request.method, self.target + request.path_qs, data=await request.read(), headers=headers) as reply:
            return reply.status, await reply.read(), reply.content_type

    async def _start(self) -> None:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
