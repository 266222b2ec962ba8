//! The data path: requests go in with tags, completions come out with them, in a poller.

use bdev::{Access, Channel, Completion, Registry, Request, malloc};
use reactor::{Config, Period, Poller, Reactor, Work};
use ring::{Channel as _, Tag};

struct Writer {
    channel: Channel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    left: u32,
}

impl Poller for Writer {
    fn name(&self) -> &str {
        "writer"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        self.channel.submit(&mut self.batch);
        let count = self.channel.poll(&mut self.sink);
        for completion in self.sink.drain(..) {
            println!("write {}: {}", completion.tag().0, completion.status());
            self.left -= 1;
        }
        if self.left == 0 { Work::Finished } else { Work::count(count) }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 4096))?;
    let reactor = Reactor::new(&Config::default())?;
    let core = reactor.core();
    let channel = registry.open("Malloc0", Access::ReadWrite)?.channel(&core)?;
    let buffer = |_| core.pool().take(4096).expect("4 KiB are below the limit");
    let batch = (0..8).map(|tag| Request::write(Tag(tag), tag * 100, 1, buffer(tag))).collect();
    core.add_poller(Box::new(Writer { channel, batch, sink: Vec::new(), left: 8 }), Period::EveryTurn);
    reactor.block_on(async move { core.sleep_ns(1_000_000).await });
    Ok(())
}
