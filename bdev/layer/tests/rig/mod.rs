//! A core to test on, and an oracle: the device as a `Vec<u8>`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses a part")]

use bdev::{Channel, Completion, Registry, Request};
use memory::Buffer;
use reactor::{Config, Core, IdlePolicy, Reactor};
use ring::{Channel as _, Flags, Op, Status, Tag};

/// A reactor on the test's own thread that never sleeps.
pub struct Rig {
    pub reactor: Reactor,
    pub core: Core,
    pub registry: Registry,
}

impl Rig {
    pub fn new() -> Rig {
        let arena = memory::Arena::new(memory::Config {
            limit_bytes: 256 << 20,
            hugepages: false,
            ..memory::Config::default()
        });
        let config = Config { idle: IdlePolicy::Spin, arena, ..Config::default() };
        let reactor = Reactor::new(&config).unwrap();
        Rig { core: reactor.core(), reactor, registry: Registry::new() }
    }

    pub fn buffer(&self, bytes: usize, fill: u8) -> Buffer {
        let mut buffer = self.core.pool().take(bytes).unwrap();
        buffer.as_mut_slice().fill(fill);
        buffer
    }

    /// Submits and polls until everything has completed; completions by tag.
    pub fn run(&mut self, channel: &mut Channel, mut batch: Vec<Request>) -> Vec<Completion> {
        let expected = batch.len();
        let mut sink = Vec::new();
        let start = std::time::Instant::now();
        while sink.len() < expected {
            channel.submit(&mut batch);
            self.reactor.turn();
            channel.poll(&mut sink);
            assert!(
                start.elapsed().as_secs() < 30,
                "{} of {expected} I/Os completed in 30 s: {sink:?}",
                sink.len()
            );
        }
        assert_eq!(sink.len(), expected);
        sink.sort_by_key(|completion| completion.tag());
        sink
    }

    pub fn one(&mut self, channel: &mut Channel, request: Request) -> Completion {
        self.run(channel, vec![request]).pop().unwrap()
    }

    pub fn write(&mut self, channel: &mut Channel, lba: u64, blocks: u32, fill: u8) -> Status {
        let buffer = self.buffer((blocks * channel.block_size()) as usize, fill);
        self.one(channel, Request::write(Tag(0), lba, blocks, buffer)).status()
    }

    pub fn read(&mut self, channel: &mut Channel, lba: u64, blocks: u32) -> Result<Vec<u8>, Status> {
        let buffer = self.buffer((blocks * channel.block_size()) as usize, 0xcc);
        let completion = self.one(channel, Request::read(Tag(0), lba, blocks, buffer));
        let status = completion.status();
        let data = completion.into_request().buffer.unwrap().as_slice().to_vec();
        if status.is_success() { Ok(data) } else { Err(status) }
    }

    pub fn simple(&mut self, channel: &mut Channel, op: Op, lba: u64, blocks: u32, flags: Flags) -> Status {
        let mut request = Request::new(Tag(0), op, lba, blocks);
        request.flags = flags;
        self.one(channel, request).status()
    }
}

/// One request as a property draws it.
#[derive(Clone, Debug)]
pub struct Draw {
    pub op: Op,
    pub lba: u64,
    pub blocks: u32,
    pub fill: u8,
    pub fua: bool,
    pub deallocate: bool,
    pub flow: u16,
}

impl Draw {
    pub fn request(&self, rig: &Rig, tag: u64, block_size: u32) -> Request {
        let mut request = Request::new(Tag(tag), self.op, self.lba, self.blocks);
        request.flow = self.flow;
        if self.fua {
            request.flags = request.flags.with(Flags::FUA);
        }
        if self.deallocate {
            request.flags = request.flags.with(Flags::DEALLOCATE);
        }
        if self.op.has_data() && self.blocks > 0 {
            request.buffer = Some(rig.buffer((self.blocks * block_size) as usize, self.fill));
        }
        request
    }
}

/// What a device of `contents.len() / block_size` blocks must answer.
pub struct Oracle {
    pub contents: Vec<u8>,
    pub block_size: usize,
}

impl Oracle {
    pub fn new(blocks: u64, block_size: u32) -> Oracle {
        Oracle {
            contents: vec![0; (blocks * u64::from(block_size)) as usize],
            block_size: block_size as usize,
        }
    }

    /// What the layer answers without asking the device.
    pub fn verdict(&self, draw: &Draw) -> Option<Status> {
        let blocks = (self.contents.len() / self.block_size) as u64;
        if !draw.op.has_range() {
            None
        } else if draw.blocks == 0 {
            Some(Status::INVALID_FIELD)
        } else if draw.lba.checked_add(u64::from(draw.blocks)).is_none_or(|end| end > blocks) {
            Some(Status::LBA_OUT_OF_RANGE)
        } else {
            None
        }
    }

    pub fn range(&mut self, draw: &Draw) -> &mut [u8] {
        let start = draw.lba as usize * self.block_size;
        &mut self.contents[start..start + draw.blocks as usize * self.block_size]
    }

    /// Does it, as if alone.
    pub fn apply(&mut self, draw: &Draw) {
        match draw.op {
            Op::Write => self.range(draw).fill(draw.fill),
            Op::Unmap | Op::WriteZeroes => self.range(draw).fill(0),
            Op::Read | Op::Flush | Op::Reset | Op::WriteUncorrectable | Op::Compare => {}
        }
    }
}
