//! Writes a block and reads it back: `hello URI`, whatever the transport.

use ring::{Request, Tag};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let uri: nvme::Uri = std::env::args().nth(1).ok_or("usage: hello URI")?.parse()?;
    let arena = memory::Arena::new(memory::Config { shared: true, ..Default::default() });
    let reactor = reactor::Reactor::new(&reactor::Config { arena, ..Default::default() })?;
    let core = reactor.core();
    reactor.block_on(async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
        let mut buffer = core.pool().take(namespace.block_size() as usize).ok_or("no memory")?;
        buffer.as_mut_slice()[..5].copy_from_slice(b"hello");
        let written = namespace.run(Request::write(Tag(0), 0, 1, buffer)).await.into_request();
        let read = namespace.run(Request { op: ring::Op::Read, ..written }).await;
        let data = read.request().buffer.as_ref().ok_or("a completion has its buffer")?;
        println!("{}: {}", read.status(), String::from_utf8_lossy(&data.as_slice()[..5]));
        Ok(())
    })
}
