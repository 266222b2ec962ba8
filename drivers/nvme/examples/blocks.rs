//! Reads or writes blocks: `blocks URI read LBA COUNT > file`, `blocks URI write LBA < file`.
//!
//! Written data is padded with zeroes to whole blocks. One request of at most 64 KiB is in flight at a time.

use dma::Data;
use std::io::{Read, Write};

use block_io::{Op, Request, Tag};

const STEP_BYTES: usize = 64 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: blocks URI read LBA COUNT | blocks URI write LBA";
    let uri: nvme::Uri = arguments.first().ok_or(usage)?.parse()?;
    let mut lba: u64 = arguments.get(2).ok_or(usage)?.parse()?;
    let count = arguments.get(3).map(|count| count.parse::<u64>()).transpose()?;
    let mut data = Vec::new();
    let op = match (arguments[1].as_str(), count) {
        ("read", Some(_)) => Op::Read,
        ("write", None) => Op::Write,
        _ => return Err(usage.into()),
    };
    if op == Op::Write {
        std::io::stdin().lock().read_to_end(&mut data)?;
    }
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, ..Default::default() });
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig { arena, ..Default::default() })?;
    let core = reactor.core();
    reactor.block_on(async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
        let size = namespace.block_size() as usize;
        match count {
            Some(count) => data.resize(count as usize * size, 0),
            None => data.resize(data.len().next_multiple_of(size), 0),
        }
        let step = STEP_BYTES.min(namespace.transfer_max_bytes() as usize) / size * size;
        for part in data.chunks_mut(step) {
            let mut buffer = core.pool().take(part.len()).ok_or("no memory")?;
            buffer.as_mut_slice().copy_from_slice(part);
            let mut request = Request::new(Tag(0), op, lba, (part.len() / size) as u32);
            request.set_data(Some(buffer));
            let done = namespace.run(request).await;
            if !done.status().is_success() {
                return Err(format!("block {lba}: {}", done.status()).into());
            }
            if let Some(buffer) = done.request().data().and_then(Data::single) {
                part.copy_from_slice(buffer.as_slice());
            }
            lba += (part.len() / size) as u64;
        }
        if op == Op::Read {
            std::io::stdout().lock().write_all(&data)?;
        }
        let flushed = namespace.run(Request::new(Tag(1), Op::Flush, 0, 0)).await.status();
        if flushed.is_success() { Ok(()) } else { Err(format!("flush: {flushed}").into()) }
    })
}
