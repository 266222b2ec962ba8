//! Layered channels over volumes in memory, compared with an oracle.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bdev::{Completion, Request};
use block_io::{Channel, Op, Status, Tag};
use cluster_map::ParentVolume;
use random::WyRand;
use reactor::{Core, Reactor, ReactorConfig};
use wire_store::{BLOCK_BYTES, BlockBitmap, OBJECT_BYTES};

use super::{ImageChain, LayerChain, LayeredChannel, VolumeChannel};

const SECTOR: u64 = 512;
/// The image is what is around the border of two objects: 16 blocks, the last of which is not whole.
const BASE: u64 = OBJECT_BYTES as u64 - 8 * BLOCK_BYTES as u64;
const SECTORS: u64 = 16 * 8 - 3;
const END: u64 = BASE + SECTORS * SECTOR;

type Block = Box<[u8; BLOCK_BYTES]>;

/// The written blocks of each volume, by the number of the block in the volume.
#[derive(Default)]
struct Volumes {
    blocks: BTreeMap<(u64, u64), Block>,
    /// Writes of a volume that is frozen are an error of the channel.
    frozen: Vec<u64>,
    /// Of 1000 writes this many fail, half of them after they have happened.
    failing: u64,
}

impl Volumes {
    fn read(&self, volume: u64, start: u64, out: &mut [u8]) {
        for (at, byte) in out.iter_mut().enumerate() {
            let at = start + at as u64;
            let block = self.blocks.get(&(volume, at / BLOCK_BYTES as u64));
            *byte = block.map_or(0, |block| block[at as usize % BLOCK_BYTES]);
        }
    }

    fn write(&mut self, volume: u64, start: u64, data: &[u8]) {
        assert!(!self.frozen.contains(&volume), "volume {volume} is written");
        for (at, byte) in data.iter().enumerate() {
            let at = start + at as u64;
            let key = (volume, at / BLOCK_BYTES as u64);
            let block = self.blocks.entry(key).or_insert_with(|| Box::new([0; BLOCK_BYTES]));
            block[at as usize % BLOCK_BYTES] = *byte;
        }
    }

    /// As a node: whole blocks are written no more.
    fn zero(&mut self, volume: u64, bytes: Range<u64>) {
        assert!(!self.frozen.contains(&volume), "volume {volume} is zeroed");
        let size = BLOCK_BYTES as u64;
        for block in bytes.start / size..bytes.end.div_ceil(size) {
            let (start, end) = (bytes.start.max(block * size), bytes.end.min((block + 1) * size));
            match end - start == size {
                true => _ = self.blocks.remove(&(volume, block)),
                false => {
                    if let Some(data) = self.blocks.get_mut(&(volume, block)) {
                        data[(start % size) as usize..][..(end - start) as usize].fill(0);
                    }
                }
            }
        }
    }

    fn written(&self, volume: u64, index: u32) -> BlockBitmap {
        let mut bitmap = BlockBitmap::default();
        let per_object = (OBJECT_BYTES / BLOCK_BYTES) as u64;
        let first = u64::from(index) * per_object;
        let of_object = self.blocks.range((volume, first)..(volume, first + per_object));
        of_object.for_each(|((_, block), _)| bitmap.set((block - first) as usize, true));
        bitmap
    }
}

enum Pending {
    Io(u64, Request),
    Done(Completion),
    List(u64, u64, u32),
    Listed(u64, BlockBitmap),
}

/// A channel that does things in any order, each at any time between its begin and its end.
struct FakeChannel {
    volumes: Rc<RefCell<Volumes>>,
    head: u64,
    pending: Vec<Pending>,
    listed: Vec<(u64, BlockBitmap)>,
    random: WyRand,
}

const PENDING_MAX: usize = 9;

impl FakeChannel {
    fn carry_out(&mut self, volume: u64, mut request: Request) -> Completion {
        let start = request.lba * SECTOR;
        let bytes = start..start + u64::from(request.blocks) * SECTOR;
        let mut volumes = self.volumes.borrow_mut();
        if request.op == Op::Read {
            let mut data = vec![0; (bytes.end - bytes.start) as usize];
            volumes.read(volume, start, &mut data);
            request.data_mut().unwrap().copy_from(0, &data);
            return request.complete(Status::SUCCESS);
        }
        assert_eq!(volume, self.head);
        let fails = self.random.below(1000) < volumes.failing;
        if !fails || self.random.happens(500) {
            match request.data() {
                Some(data) => {
                    let mut copy = vec![0; data.len()];
                    data.copy_to(0, &mut copy);
                    assert_eq!(copy.len() as u64, bytes.end - bytes.start);
                    volumes.write(volume, start, &copy);
                }
                None => volumes.zero(volume, bytes),
            }
        }
        request.complete(if fails { Status::INTERNAL_ERROR } else { Status::SUCCESS })
    }
}

impl Channel for FakeChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let count = batch.len().min(PENDING_MAX.saturating_sub(self.pending.len()));
        self.pending.extend(batch.drain(..count).map(|request| Pending::Io(self.head, request)));
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        for _ in 0..self.random.below(4) {
            if self.pending.is_empty() {
                break;
            }
            let index = self.random.below(self.pending.len() as u64) as usize;
            match self.pending.swap_remove(index) {
                Pending::Io(volume, request) => {
                    let done = Pending::Done(self.carry_out(volume, request));
                    self.pending.push(done);
                }
                Pending::List(key, volume, index) => {
                    let bitmap = self.volumes.borrow().written(volume, index);
                    self.pending.push(Pending::Listed(key, bitmap));
                }
                Pending::Done(completion) => sink.push(completion),
                Pending::Listed(key, bitmap) => self.listed.push((key, bitmap)),
            }
        }
        sink.len() - before
    }
}

impl VolumeChannel for FakeChannel {
    fn read_volume(&mut self, volume: u64, request: Request) -> Result<(), Request> {
        if self.pending.len() >= PENDING_MAX {
            return Err(request);
        }
        self.pending.push(Pending::Io(volume, request));
        Ok(())
    }

    fn list_written(&mut self, key: u64, volume: u64, index: u32) -> bool {
        let may = self.pending.len() < PENDING_MAX;
        if may {
            self.pending.push(Pending::List(key, volume, index));
        }
        may
    }

    fn take_written(&mut self) -> Option<(u64, Result<BlockBitmap, Status>)> {
        self.listed.pop().map(|(key, bitmap)| (key, Ok(bitmap)))
    }

    fn set_head(&mut self, volume: u64) {
        assert!(self.pending.is_empty());
        self.head = volume;
    }
}

/// A request that is not complete: its channel, its sectors, and what it writes.
struct InFlight {
    channel: usize,
    op: Op,
    sectors: Range<u64>,
    data: Vec<u8>,
}

struct Rig {
    core: Core,
    volumes: Rc<RefCell<Volumes>>,
    chain: Arc<ImageChain>,
    channels: Vec<LayeredChannel<FakeChannel>>,
    in_flight: BTreeMap<u64, InFlight>,
    /// What the image has.
    expected: Vec<u8>,
    next_tag: u64,
    random: WyRand,
}

impl Rig {
    fn new(core: &Core, seed: u64, channels: usize) -> Rig {
        let volumes = Rc::new(RefCell::new(Volumes::default()));
        let chain = Arc::new(ImageChain::new(LayerChain::new(1, Vec::new(), false)));
        let mut random = WyRand::new(seed);
        let mut rig = Rig {
            core: core.clone(),
            volumes,
            chain,
            channels: Vec::new(),
            in_flight: BTreeMap::new(),
            expected: vec![0; (SECTORS * SECTOR) as usize],
            next_tag: 0,
            random: random.split(),
        };
        for _ in 0..channels {
            let channel = rig.channel(&rig.chain.clone(), random.split());
            rig.channels.push(channel);
        }
        rig
    }

    fn channel(&self, chain: &Arc<ImageChain>, random: WyRand) -> LayeredChannel<FakeChannel> {
        let (volumes, head) = (self.volumes.clone(), chain.get().0.head());
        let io = FakeChannel { volumes, head, pending: Vec::new(), listed: Vec::new(), random };
        LayeredChannel::new(&self.core, io, chain.clone(), SECTOR as u32)
    }

    fn buffer(&self, bytes: usize) -> dma::Buffer {
        self.core.pool().take(bytes).unwrap()
    }

    fn is_free(&self, sectors: &Range<u64>, op: Op) -> bool {
        self.in_flight.values().all(|other| {
            let is_apart = other.sectors.end <= sectors.start || sectors.end <= other.sectors.start;
            is_apart || (op == Op::Read && other.op == Op::Read)
        })
    }

    /// Begins a request on a channel, unless others have some of its sectors.
    fn begin(&mut self) {
        let op = [Op::Read, Op::Write, Op::Write, Op::Write, Op::WriteZeroes, Op::Unmap];
        let op = op[self.random.below(op.len() as u64) as usize];
        let start = self.random.below(SECTORS);
        let mut end = (start + 1 + self.random.below(30)).min(SECTORS);
        let mut start = start;
        if self.random.happens(300) {
            (start, end) = (start / 8 * 8, end.div_ceil(8).min(SECTORS / 8) * 8);
        }
        if op.has_data() && start < 64 && end > 64 {
            // The block layer divides data between objects.
            end = 64;
        }
        if start >= end || !self.is_free(&(start..end), op) {
            return;
        }
        let value = self.random.below(255) as u8 + 1;
        let bytes = ((end - start) * SECTOR) as usize;
        let data: Vec<u8> = match op {
            Op::Write => (0..bytes).map(|at| value.wrapping_add((at / SECTOR as usize) as u8)).collect(),
            _ => vec![0; bytes],
        };
        let channel = self.random.below(self.channels.len() as u64) as usize;
        self.submit(channel, op, start..end, data);
    }

    fn submit(&mut self, channel: usize, op: Op, sectors: Range<u64>, data: Vec<u8>) {
        let tag = self.next_tag;
        self.next_tag += 1;
        let count = (sectors.end - sectors.start) as u32;
        let mut request = Request::new(Tag(tag), op, BASE / SECTOR + sectors.start, count);
        if op.has_data() {
            let mut buffer = self.buffer(data.len());
            buffer.as_mut_slice().copy_from_slice(&data);
            request.set_data(Some(buffer));
        }
        let mut batch = vec![request];
        self.in_flight.insert(tag, InFlight { channel, op, sectors, data });
        while !batch.is_empty() {
            self.channels[channel].submit(&mut batch);
            if !batch.is_empty() {
                self.poll();
            }
        }
    }

    fn poll(&mut self) {
        for channel in 0..self.channels.len() {
            let mut done = Vec::new();
            self.channels[channel].poll(&mut done);
            done.into_iter().for_each(|completion| self.completed(channel, completion));
        }
    }

    fn completed(&mut self, channel: usize, completion: Completion) {
        let request = self.in_flight.remove(&completion.tag().0).expect("it was in flight");
        assert_eq!((channel, completion.request().op), (request.channel, request.op));
        assert_eq!(completion.request().lba, BASE / SECTOR + request.sectors.start);
        let range = (request.sectors.start * SECTOR) as usize..(request.sectors.end * SECTOR) as usize;
        if !completion.status().is_success() {
            // It happened, or not: it is repeated until it has.
            assert_ne!(request.op, Op::Read);
            return self.submit(channel, request.op, request.sectors, request.data);
        }
        if request.op == Op::Read {
            let data = completion.into_data().unwrap();
            let mut found = vec![0; data.len()];
            data.copy_to(0, &mut found);
            let differs = (0..found.len()).find(|at| found[*at] != self.expected[range.start + at]);
            assert_eq!(differs.map(|at| range.start + at), None, "a read of sectors {:?}", request.sectors);
        } else {
            if let Some(data) = completion.into_data() {
                assert_eq!(data.len(), request.data.len(), "data comes back");
            }
            self.expected[range].copy_from_slice(&request.data);
        }
    }

    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.poll();
        }
    }

    /// What a chain has, read sector by sector from a channel of its own.
    fn read_all(&mut self, chain: LayerChain) -> Vec<u8> {
        let mut random = self.random.split();
        let mut channel = self.channel(&Arc::new(ImageChain::new(chain)), random.split());
        let mut found = Vec::new();
        let mut at = 0;
        while at < SECTORS {
            let end = (at + 1 + random.below(20)).min(if at < 64 { 64 } else { SECTORS });
            let bytes = ((end - at) * SECTOR) as usize;
            let read = Request::read(Tag(at), BASE / SECTOR + at, (end - at) as u32, self.buffer(bytes));
            channel.submit(&mut vec![read]);
            let mut done = Vec::new();
            while channel.poll(&mut done) == 0 {}
            let completion = done.pop().unwrap();
            assert!(completion.status().is_success());
            let data = completion.into_data().unwrap();
            let mut part = vec![0; bytes];
            data.copy_to(0, &mut part);
            found.extend(part);
            at = end;
        }
        found
    }
}

/// A snapshot of the oracle.
struct Frozen {
    volume: u64,
    parents: Vec<ParentVolume>,
    expected: Vec<u8>,
}

fn run(core: &Core, seed: u64, failing: u64) {
    let mut rig = Rig::new(core, seed, 2);
    rig.volumes.borrow_mut().failing = failing;
    let mut snapshots: Vec<Frozen> = Vec::new();
    let mut parents: Vec<ParentVolume> = Vec::new();
    let mut head = 1;
    for round in 0..5 {
        for _ in 0..60 {
            rig.begin();
            rig.poll();
        }
        rig.drain();
        if round == 4 {
            break;
        }
        // A snapshot, and in some rounds a rollback to an older one, or a smaller size for some time.
        rig.volumes.borrow_mut().frozen.push(head);
        snapshots.push(Frozen { volume: head, parents: parents.clone(), expected: rig.expected.clone() });
        parents.insert(0, ParentVolume { volume: head, bytes: END });
        head += 1;
        if rig.random.happens(300) {
            let at = rig.random.below(snapshots.len() as u64) as usize;
            let Frozen { volume, parents: below, expected } = &snapshots[at];
            parents = below.clone();
            parents.insert(0, ParentVolume { volume: *volume, bytes: END });
            rig.expected = expected.clone();
        }
        if rig.random.happens(300) {
            let sectors = rig.random.below(SECTORS);
            let limit = BASE + sectors * SECTOR;
            parents.iter_mut().for_each(|parent| parent.bytes = parent.bytes.min(limit));
            rig.expected[(sectors * SECTOR) as usize..].fill(0);
        }
        rig.chain.replace(LayerChain::new(head, parents.clone(), false));
    }
    // Nothing has changed the snapshots, and another process finds what was written.
    for Frozen { volume, parents, expected } in snapshots {
        assert!(rig.read_all(LayerChain::new(volume, parents, false)) == expected, "snapshot {volume}");
    }
    let expected = rig.expected.clone();
    for is_volatile in [false, true] {
        assert!(rig.read_all(LayerChain::new(head, parents.clone(), is_volatile)) == expected);
    }
}

fn run_seeds(failing: u64) {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let seeds = if cfg!(miri) { 0..2 } else { 0..150 };
    for seed in seeds {
        println!("seed {seed}");
        run(&reactor.core(), seed, failing);
    }
}

#[test]
fn a_chain_of_volumes_is_an_image_and_its_snapshots_stay_as_they_were() {
    run_seeds(0);
}

#[test]
fn writes_that_fail_leave_no_parent_data_over_what_was_acknowledged() {
    run_seeds(60);
}

#[test]
fn a_reader_of_an_image_that_another_process_writes_sees_what_was_acknowledged() {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    for seed in 0..100 {
        let mut rig = Rig::new(&reactor.core(), seed, 1);
        let parents = vec![ParentVolume { volume: 1, bytes: END }];
        rig.volumes.borrow_mut().write(1, BASE, &vec![7; (SECTORS * SECTOR) as usize]);
        rig.expected.fill(7);
        rig.chain.replace(LayerChain::new(2, parents.clone(), false));
        // The second channel is that of another process, and only reads.
        let reads = Arc::new(ImageChain::new(LayerChain::new(2, parents, true)));
        let reader = rig.channel(&reads, WyRand::new(seed + 1000));
        rig.channels.push(reader);
        for _ in 0..60 {
            let op = if rig.random.happens(500) { Op::Read } else { Op::Write };
            let start = rig.random.below(SECTORS);
            let end = (start + 1 + rig.random.below(12)).min(if start < 64 { 64 } else { SECTORS });
            if rig.is_free(&(start..end), op) {
                let data = vec![rig.random.below(256) as u8; ((end - start) * SECTOR) as usize];
                rig.submit(usize::from(op == Op::Read), op, start..end, data);
            }
            rig.poll();
        }
        rig.drain();
    }
}

#[test]
fn an_image_of_one_volume_is_passed_through_as_it_is() {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let mut rig = Rig::new(&reactor.core(), 1, 1);
    rig.submit(0, Op::Write, 3..40, vec![9; 37 * SECTOR as usize]);
    // No list of what is written was asked for.
    assert!(matches!(rig.channels[0].io.pending[..], [Pending::Io(1, _)]));
    rig.drain();
    rig.submit(0, Op::Read, 0..50, vec![0; 50 * SECTOR as usize]);
    rig.drain();
}

#[test]
fn a_pause_lasts_until_nothing_is_in_flight_and_nothing_begins_meanwhile() {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let mut rig = Rig::new(&reactor.core(), 1, 2);
    rig.submit(0, Op::Write, 3..40, vec![9; 37 * SECTOR as usize]);
    assert!(!rig.chain.pause(Duration::from_millis(1)), "a write is in flight");
    for channel in 0..2 {
        let mut batch = vec![Request::read(Tag(100), BASE / SECTOR, 1, rig.buffer(SECTOR as usize))];
        rig.channels[channel].submit(&mut batch);
        assert_eq!(batch.len(), 1, "it waits with its owner");
        assert!(rig.channels[channel].deadline().is_some(), "and is tried again");
    }
    let chain = rig.chain.clone();
    let waiting = std::thread::spawn(move || chain.pause(Duration::from_secs(60)));
    rig.drain();
    assert!(waiting.join().unwrap());
    rig.chain.resume();
    rig.submit(1, Op::Read, 0..50, vec![0; 50 * SECTOR as usize]);
    rig.drain();
}
