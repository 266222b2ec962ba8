//! Writes a block and reads it back over any transport: `hello URI`.

use block_io::{Request, Tag};
use dma::Data;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let uri: nvme::Uri = std::env::args().nth(1).ok_or("usage: hello URI")?.parse()?;
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, ..Default::default() });
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig { arena, ..Default::default() })?;
    let core = reactor.core();
    reactor.block_on(async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
        let mut buffer = core.pool().take(namespace.block_size() as usize).ok_or("no memory")?;
        buffer.as_mut_slice()[..5].copy_from_slice(b"hello");
        let written = namespace.run(Request::write(Tag(0), 0, 1, buffer)).await.into_request();
        let read = namespace.run(Request { op: block_io::Op::Read, ..written }).await;
        let data = read.request().data().and_then(Data::single).ok_or("the completion has no buffer")?;
        println!("{}: {}", read.status(), String::from_utf8_lossy(&data.as_slice()[..5]));
        Ok(())
    })
}
