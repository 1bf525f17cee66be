"""Two network namespaces that stand for two machines, and a cable that can be cut, be slow, or lose packets."""
import fcntl, heapq, os, random, select, struct, threading, time, uuid

from job import Unavailable, needs_root, system

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000


class Cable:
    """Copies IP packets between two TUN devices, one in each namespace. Works on kernels without netem as well."""

    def __init__(self, folder, undo):
        needs_root("a network namespace")
        self.boot_ids = [os.path.join(folder, f"boot_id{host}") for host in range(2)]
        for path in self.boot_ids:
            open(path, "w").write(f"{uuid.uuid4()}\n")
        self.whole, self.loss, self.delay = True, 0.0, 0.0  # seconds, of each direction
        self.packets, self.lost = 0, 0
        self.names = [f"syncbn-fault-{os.getpid()}-{host}" for host in range(2)]
        self.devices = []
        undo.append(self.remove)
        for host, name in enumerate(self.names):
            system("ip", "netns", "add", name)
            try:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            except OSError as error:
                raise Unavailable(f"/dev/net/tun: {error.strerror}", "tun") from None
            self.devices.append(device)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", f"fault{host}".encode(), IFF_TUN | IFF_NO_PI))
            system("ip", "link", "set", f"fault{host}", "netns", name)
            for words in (f"addr add {self.address(host)}/24 dev fault{host}", f"link set fault{host} up",
                          "link set lo up"):
                system("ip", "-n", name, *words.split())
        self.ends, self.stopper = os.pipe()
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    def address(self, host):
        return f"10.78.0.{host + 1}"

    def on(self, host):
        """The command that runs a program on a host, with another boot ID, or ranks would share memory."""
        text = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
        return ("ip", "netns", "exec", self.names[host], "sh", "-c", text, self.boot_ids[host])

    def carry(self):
        in_flight = []  # (time of arrival, number, device, packet)
        while True:
            wait = max(0, in_flight[0][0] - time.monotonic()) if in_flight else None
            ready = select.select([*self.devices, self.ends], [], [], wait)[0]
            if self.ends in ready:
                return
            for device in ready:
                packet = os.read(device, 65536)
                self.packets += 1
                if not self.whole or random.random() < self.loss:
                    self.lost += 1
                    continue
                other = self.devices[1 - self.devices.index(device)]
                heapq.heappush(in_flight, (time.monotonic() + self.delay, self.packets, other, packet))
            while in_flight and in_flight[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(in_flight)
                try: os.write(device, packet)
                except OSError: pass  # its queue is full: the packet is lost

    def remove(self):
        if hasattr(self, "thread"):
            os.write(self.stopper, b"x")
            self.thread.join()
        for device in self.devices:
            os.close(device)
        for name in self.names:
            try: system("ip", "netns", "delete", name)
            except Unavailable: pass
