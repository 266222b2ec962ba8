//! The data path: a poller submits tagged requests and polls for their completions.

use bdev::{Access, BdevChannel, Completion, Registry, Request, malloc};
use block_io::{Channel as _, Tag};
use reactor::{Period, PollResult, Poller, Reactor, ReactorConfig};

struct Writer {
    channel: BdevChannel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    remaining: u32,
}

impl Poller for Writer {
    fn name(&self) -> &str {
        "writer"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        self.channel.submit(&mut self.batch);
        let count = self.channel.poll(&mut self.sink);
        for completion in self.sink.drain(..) {
            println!("write {}: {}", completion.tag().0, completion.status());
            self.remaining -= 1;
        }
        if self.remaining == 0 { PollResult::Finished } else { PollResult::from_count(count) }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 4096))?;
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let core = reactor.core();
    let channel = registry.open("Malloc0", Access::ReadWrite)?.channel(&core)?;
    let buffer = |_| core.pool().take(4096).expect("4 KiB are below the limit");
    let batch = (0..8).map(|tag| Request::write(Tag(tag), tag * 100, 1, buffer(tag))).collect();
    core.add_poller(Box::new(Writer { channel, batch, sink: Vec::new(), remaining: 8 }), Period::EveryTurn);
    reactor.block_on(async move { core.sleep_ns(1_000_000).await });
    Ok(())
}
