//! A reactor to test on, and an oracle that models the device as a `Vec<u8>`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses a part")]

use bdev::{BdevChannel, Completion, Registry, Request};
use block_io::{Channel as _, Op, RequestFlags, Status, Tag};
use dma::Buffer;
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};

/// A reactor on the test's thread that never sleeps, and an empty registry.
pub struct Rig {
    pub reactor: Reactor,
    pub core: Core,
    pub registry: Registry,
}

impl Rig {
    pub fn new() -> Rig {
        let arena = dma::Arena::new(dma::ArenaConfig {
            limit_bytes: 256 << 20,
            hugepages: false,
            ..dma::ArenaConfig::default()
        });
        let config = ReactorConfig { idle: IdlePolicy::Spin, arena, ..ReactorConfig::default() };
        let reactor = Reactor::new(&config).unwrap();
        Rig { core: reactor.core(), reactor, registry: Registry::new() }
    }

    pub fn buffer(&self, bytes: usize, fill: u8) -> Buffer {
        let mut buffer = self.core.pool().take(bytes).unwrap();
        buffer.as_mut_slice().fill(fill);
        buffer
    }

    /// Submits and polls until all requests have completed; returns the completions sorted by tag.
    pub fn run(&mut self, channel: &mut BdevChannel, mut batch: Vec<Request>) -> Vec<Completion> {
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

    pub fn one(&mut self, channel: &mut BdevChannel, request: Request) -> Completion {
        self.run(channel, vec![request]).pop().unwrap()
    }

    pub fn write(&mut self, channel: &mut BdevChannel, lba: u64, blocks: u32, fill: u8) -> Status {
        let buffer = self.buffer((blocks * channel.block_size()) as usize, fill);
        self.one(channel, Request::write(Tag(0), lba, blocks, buffer)).status()
    }

    pub fn read(&mut self, channel: &mut BdevChannel, lba: u64, blocks: u32) -> Result<Vec<u8>, Status> {
        let buffer = self.buffer((blocks * channel.block_size()) as usize, 0xcc);
        let completion = self.one(channel, Request::read(Tag(0), lba, blocks, buffer));
        let status = completion.status();
        let data = completion.into_request().take_data().unwrap().slices()[0].as_slice().to_vec();
        if status.is_success() { Ok(data) } else { Err(status) }
    }

    pub fn simple(
        &mut self,
        channel: &mut BdevChannel,
        op: Op,
        lba: u64,
        blocks: u32,
        flags: RequestFlags,
    ) -> Status {
        let mut request = Request::new(Tag(0), op, lba, blocks);
        request.flags = flags;
        self.one(channel, request).status()
    }
}

/// A randomly generated request.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    pub op: Op,
    pub lba: u64,
    pub blocks: u32,
    pub fill: u8,
    pub fua: bool,
    pub deallocate: bool,
    pub flow: u16,
}

impl RequestSpec {
    pub fn request(&self, rig: &Rig, tag: u64, block_size: u32) -> Request {
        let mut request = Request::new(Tag(tag), self.op, self.lba, self.blocks);
        request.flow = self.flow;
        if self.fua {
            request.flags |= RequestFlags::FUA;
        }
        if self.deallocate {
            request.flags |= RequestFlags::DEALLOCATE;
        }
        if self.op.has_data() && self.blocks > 0 {
            request.set_data(Some(rig.buffer((self.blocks * block_size) as usize, self.fill)));
        }
        request
    }
}

/// The expected contents and results of a device of `contents.len() / block_size` blocks.
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

    /// The error of an invalid request, which the layer returns itself.
    pub fn expected_error(&self, spec: &RequestSpec) -> Option<Status> {
        let blocks = (self.contents.len() / self.block_size) as u64;
        if !spec.op.has_range() {
            None
        } else if spec.blocks == 0 {
            Some(Status::INVALID_FIELD)
        } else if spec.lba.checked_add(u64::from(spec.blocks)).is_none_or(|end| end > blocks) {
            Some(Status::LBA_OUT_OF_RANGE)
        } else {
            None
        }
    }

    pub fn range(&mut self, spec: &RequestSpec) -> &mut [u8] {
        let start = spec.lba as usize * self.block_size;
        &mut self.contents[start..start + spec.blocks as usize * self.block_size]
    }

    /// Applies the request to the contents.
    pub fn apply(&mut self, spec: &RequestSpec) {
        match spec.op {
            Op::Write => self.range(spec).fill(spec.fill),
            Op::Unmap | Op::WriteZeroes => self.range(spec).fill(0),
            _ => {}
        }
    }
}
