//! Random SGLs of data blocks, bit buckets and segments against a model of Base 2.1, section 4.3.2.

use block_io::Status;
use random::WyRand;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Sgl;
use wire_nvme::{DataPointer, Sqe};

use crate::host::{DATA, HostQueuePair, IOVA, VfioUserTestHost, transfer};
use crate::io::{bytes, pattern};
use crate::test_target::VfioUserTestTarget;

/// Blocks of a command at most, of 512 bytes.
const BLOCKS_MAX: u64 = 64;
/// Where data blocks are, from `DATA`: each has an area of its own.
const AREAS: u64 = 0x10_0000;
const AREA_BYTES: u64 = 0xa000;
/// Where segments of descriptors are, from `DATA`.
const SEGMENTS: u64 = 0x1000;
/// What memory that no command may write is filled with.
const CANARY: u8 = 0xa5;

/// A descriptor of data: bytes at an offset in the host's memory, or a bit bucket.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Block { at: u64, bytes: u32 },
    Bucket { bytes: u32 },
}

impl Piece {
    fn sgl(self) -> Sgl {
        match self {
            Piece::Block { at, bytes } => Sgl::DataBlock { address: IOVA + at, length: bytes },
            Piece::Bucket { bytes } => Sgl::BitBucket { length: bytes },
        }
    }
}

/// Random pieces, some of no bytes, which together have `bytes` bytes as a read counts them.
fn pieces(random: &mut WyRand, bytes: u32) -> Vec<Piece> {
    let (mut all, mut left, mut area) = (Vec::new(), bytes, DATA + AREAS);
    while left > 0 || random.happens(200) {
        let most = if random.happens(500) { left.min(700) } else { left };
        let bytes = random.below(u64::from(most) + 1) as u32;
        left -= bytes;
        if random.happens(400) {
            all.push(Piece::Bucket { bytes });
        } else if all.len() < 60 {
            all.push(Piece::Block { at: area + random.below(16), bytes });
            area += AREA_BYTES;
        } else {
            left += bytes;
            all.push(Piece::Bucket { bytes: left });
            left = 0;
        }
    }
    all
}

/// Writes the pieces as one descriptor, or as a chain of segments; returns that of the command.
fn write_sgl(host: &VfioUserTestHost, random: &mut WyRand, pieces: &[Piece]) -> DataPointer {
    if let [one] = pieces
        && random.happens(700)
    {
        return one.sgl().into();
    }
    // From the last segment to the first.
    let (mut rest, mut at, mut next) = (pieces, DATA + SEGMENTS, None);
    loop {
        // A segment has at least one descriptor: the last one of data, those before it the next segment.
        let count = rest.len() - random.index(rest.len() + 1);
        let count = if next.is_none() { count.max(1).min(rest.len()) } else { count };
        let (before, own) = rest.split_at(rest.len() - count);
        let descriptors: Vec<Sgl> = own.iter().map(|piece| piece.sgl()).chain(next).collect();
        for (index, one) in descriptors.iter().enumerate() {
            let pointer = DataPointer::from(*one);
            host.memory.store_u64(at + index as u64 * 16, pointer.low);
            host.memory.store_u64(at + index as u64 * 16 + 8, pointer.high);
        }
        let length = descriptors.len() as u32 * 16;
        let segment = Sgl::Segment { offset: false, last: next.is_none(), address: IOVA + at, length };
        if before.is_empty() {
            return segment.into();
        }
        (rest, next) = (before, Some(segment));
        at += u64::from(length).next_multiple_of(8) + 8 * random.below(4);
    }
}

struct Rig {
    host: VfioUserTestHost,
    queue: HostQueuePair,
}

impl Rig {
    fn run(&mut self, opcode: NvmOpcode, lba: u64, blocks: u64, data: DataPointer) -> Status {
        let flags = Sqe::FLAGS_SGL;
        let sqe = Sqe { flags, data, ..transfer(opcode, lba, blocks as u32, 0, 0) };
        self.host.execute(&mut self.queue, sqe).status
    }

    fn write_whole(&mut self, lba: u64, data: &[u8]) {
        self.host.memory.write(DATA + 0x8_0000, data);
        let whole = Sgl::DataBlock { address: IOVA + DATA + 0x8_0000, length: data.len() as u32 };
        let blocks = data.len() as u64 / 512;
        assert_eq!(self.run(NvmOpcode::Write, lba, blocks, whole.into()), Status::SUCCESS);
    }

    fn read_whole(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        let whole = Sgl::DataBlock { address: IOVA + DATA + 0x8_0000, length: blocks as u32 * 512 };
        assert_eq!(self.run(NvmOpcode::Read, lba, blocks, whole.into()), Status::SUCCESS);
        bytes(&self.host, DATA + 0x8_0000, blocks as usize * 512)
    }

    /// A read transfers what the model says, and writes no other byte of the areas.
    fn check_read(&mut self, random: &mut WyRand, lba: u64, blocks: u64, disk: &[u8]) {
        let parts = pieces(random, blocks as u32 * 512);
        let mut expected = vec![CANARY; (60 * AREA_BYTES) as usize + 4096];
        self.host.memory.write(DATA + AREAS, &expected);
        let pointer = write_sgl(&self.host, random, &parts);
        assert_eq!(self.run(NvmOpcode::Read, lba, blocks, pointer), Status::SUCCESS, "{parts:?}");
        let mut done = 0;
        for piece in &parts {
            match *piece {
                Piece::Bucket { bytes } => done += bytes as usize,
                Piece::Block { at, bytes } => {
                    let (at, bytes) = ((at - DATA - AREAS) as usize, bytes as usize);
                    expected[at..at + bytes].copy_from_slice(&disk[done..done + bytes]);
                    done += bytes;
                }
            }
        }
        assert!(bytes(&self.host, DATA + AREAS, expected.len()) == expected, "{parts:?}");
    }

    /// Buckets of a write have no bytes, whatever their length says. Without them the data must be as long as
    /// the blocks; then Compare agrees with what was written.
    fn check_write(&mut self, random: &mut WyRand, lba: u64, blocks: u64) {
        let parts = pieces(random, blocks as u32 * 512);
        let mut source = Vec::new();
        for piece in &parts {
            if let Piece::Block { at, bytes } = *piece {
                let data = pattern(random.below(256) as u8, bytes as usize);
                self.host.memory.write(at, &data);
                source.extend(data);
            }
        }
        let pointer = write_sgl(&self.host, random, &parts);
        let before = self.read_whole(lba, BLOCKS_MAX);
        let complete = (source.len() / 512) as u64;
        let wrong = complete + 1;
        let length = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
        assert_eq!(self.run(NvmOpcode::Write, lba, wrong, pointer), length, "{parts:?}");
        assert!(self.read_whole(lba, BLOCKS_MAX) == before, "nothing is written: {parts:?}");
        if complete == 0 || source.len() % 512 != 0 {
            return;
        }
        assert_eq!(self.run(NvmOpcode::Write, lba, complete, pointer), Status::SUCCESS, "{parts:?}");
        assert!(self.read_whole(lba, complete) == source, "{parts:?}");
        assert_eq!(self.run(NvmOpcode::Compare, lba, complete, pointer), Status::SUCCESS, "{parts:?}");
    }
}

fn check(rig: &VfioUserTestTarget) {
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let queue = host.create_queue_pair(1, 64);
    let mut rig = Rig { host, queue };
    for seed in 0..300 {
        println!("seed {seed}");
        let mut random = WyRand::new(seed);
        let (lba, blocks) = (random.below(100), 1 + random.below(BLOCKS_MAX));
        let disk = pattern(seed as u8, blocks as usize * 512);
        rig.write_whole(lba, &disk);
        rig.check_read(&mut random, lba, blocks, &disk);
        rig.check_write(&mut random, lba, blocks.min(BLOCKS_MAX - 1));
        // Blocks of data alone, of a multiple of 512 bytes, among buckets that a write ignores.
        let whole = [
            Piece::Bucket { bytes: random.next_bits() as u32 },
            Piece::Block { at: DATA + AREAS, bytes: 512 },
            Piece::Bucket { bytes: u32::MAX },
            Piece::Block { at: DATA + AREAS + 0x3000, bytes: 1024 },
        ];
        rig.host.memory.write(DATA + AREAS, &pattern(seed as u8 ^ 0x55, 0x4000));
        let pointer = write_sgl(&rig.host, &mut random, &whole);
        assert_eq!(rig.run(NvmOpcode::Write, lba, 3, pointer), Status::SUCCESS);
        let mut source = bytes(&rig.host, DATA + AREAS, 512);
        source.extend(bytes(&rig.host, DATA + AREAS + 0x3000, 1024));
        assert!(rig.read_whole(lba, 3) == source);
        // The same SGL is too long for a read.
        let length = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
        assert_eq!(rig.run(NvmOpcode::Read, lba, 3, pointer), length);
    }
}

#[test]
fn reads_discard_what_bit_buckets_cover_and_writes_ignore_them() {
    check(&VfioUserTestTarget::new());
}

/// The same with a device for which most data must be copied.
#[test]
fn bit_buckets_with_a_device_that_requires_alignment() {
    check(&VfioUserTestTarget::with_file());
}

#[test]
fn a_bit_bucket_is_as_long_as_the_read() {
    let target = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&target.directory);
    let queue = host.create_queue_pair(1, 64);
    let mut rig = Rig { host, queue };
    let length = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    for (opcode, bytes, status) in [
        (NvmOpcode::Read, 4096, Status::SUCCESS),
        (NvmOpcode::Read, 4095, length),
        (NvmOpcode::Read, 4097, length),
        (NvmOpcode::Read, 0, length),
        (NvmOpcode::Read, u32::MAX, length),
        (NvmOpcode::Write, 4096, length),
        (NvmOpcode::Compare, 4096, length),
    ] {
        let bucket = Sgl::BitBucket { length: bytes };
        assert_eq!(rig.run(opcode, 0, 8, bucket.into()), status, "{opcode:?} of {bytes} bytes");
    }
}
