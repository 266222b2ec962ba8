//! A disk that takes whole units of several blocks only, as a raid5f array.

use bdev::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, IoLimits, Request,
};
use block_io::{Op, Status};
use reactor::Core;
use wire_nbd::{Info, NbdCommand};

use super::tests::Client;
use super::*;
use crate::limits::WRITE_PIECE_BYTES;

/// Blocks of a unit of 192 KiB, of which a piece of a write is no multiple.
const UNIT_BLOCKS: u32 = 384;
const UNIT_BYTES: usize = UNIT_BLOCKS as usize * BLOCK_BYTES;

/// Passes on what has whole units, and rejects other writes.
struct UnitDisk(Arc<BlockDevice>);

impl Bdev for UnitDisk {
    fn product_name(&self) -> &'static str {
        "disk of units"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { write_unit_blocks: UNIT_BLOCKS, ..self.0.geometry() }
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush) && self.0.supports(op)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits { boundary_blocks: UNIT_BLOCKS, ..self.0.bdev().io_limits() }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(UnitChannel { disk: self.0.bdev().open(core)?, rejected: Vec::new() }))
    }
}

struct UnitChannel {
    disk: BoxedChannel,
    rejected: Vec<Completion>,
}

impl block_io::Channel for UnitChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in std::mem::take(batch) {
            let is_whole = request.blocks == UNIT_BLOCKS && request.lba % u64::from(UNIT_BLOCKS) == 0;
            if request.op == Op::Write && !is_whole {
                self.rejected.push(request.complete(Status::INVALID_FIELD));
            } else {
                batch.push(request);
            }
        }
        self.disk.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let rejected = self.rejected.len();
        sink.append(&mut self.rejected);
        rejected + self.disk.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        if self.rejected.is_empty() { self.disk.deadline() } else { Some(0) }
    }
}

fn target() -> SimulatedTarget {
    SimulatedTarget::with_disk(1, NetworkFaults::default(), &ReactorConfig::default(), |registry| {
        let disk = registry.find("Malloc0").expect("it is there");
        registry.register("Units0", None, &[], Arc::new(UnitDisk(disk))).expect("a new name");
        "Units0"
    })
}

#[test]
fn a_write_of_several_units_is_divided_between_them() {
    assert!(!(WRITE_PIECE_BYTES as usize).is_multiple_of(UNIT_BYTES));
    let mut target = target();
    let mut client = Client::begin(&mut target);
    for (command, offset, units) in [
        (NbdCommand::Write, UNIT_BYTES, 2),
        (NbdCommand::Write, 0, 5),
        (NbdCommand::WriteZeroes, UNIT_BYTES, 3),
    ] {
        let length = units * UNIT_BYTES;
        let data: Vec<u8> = (0..length).map(|at| (at / 1000 + units) as u8).collect();
        let (sent, expected) =
            if command == NbdCommand::Write { (&data[..], data.clone()) } else { (&[][..], vec![0; length]) };
        client.request(&mut target, command, offset, sent, length);
        assert_eq!(client.reply(&mut target).error, 0, "{command:?} of {units} units at {offset}");
        client.request(&mut target, NbdCommand::Read, offset, &[], length);
        assert_eq!(client.reply(&mut target).error, 0);
        assert!(client.read(&mut target, length) == expected, "{command:?} of {units} units at {offset}");
    }
}

#[test]
fn a_write_of_a_part_of_a_unit_is_rejected_before_any_of_it_is_written() {
    const EINVAL: u32 = 22;
    let mut target = target();
    let mut client = Client::begin(&mut target);
    client.request(&mut target, NbdCommand::Write, 0, &[1; 2 * UNIT_BYTES], 2 * UNIT_BYTES);
    assert_eq!(client.reply(&mut target).error, 0);
    for (offset, length) in
        [(0, BLOCK_BYTES), (0, UNIT_BYTES + BLOCK_BYTES), (BLOCK_BYTES, UNIT_BYTES), (0, UNIT_BYTES + 1)]
    {
        client.request(&mut target, NbdCommand::Write, offset, &vec![2; length], length);
        assert_eq!(client.reply(&mut target).error, EINVAL, "{length} bytes at {offset}");
    }
    client.request(&mut target, NbdCommand::Read, 0, &[], 2 * UNIT_BYTES);
    assert_eq!(client.reply(&mut target).error, 0);
    assert!(client.read(&mut target, 2 * UNIT_BYTES) == [1; 2 * UNIT_BYTES], "nothing is written");
}

#[test]
fn block_sizes_say_as_much_of_the_unit_as_the_protocol_can() {
    let target = target();
    let names = |read_only| ExportNames {
        name: "disk".into(),
        description: String::new(),
        read_only,
        requires_tls: false,
    };
    let sizes =
        |read_only| Export::new(1, 0, PORT, names(read_only), target.descriptor.device()).block_sizes();
    let Info::BlockSize { minimum, preferred, .. } = sizes(false) else { panic!("{:?}", sizes(false)) };
    assert_eq!((minimum, preferred), (64 << 10, 64 << 10));
    let Info::BlockSize { minimum, .. } = sizes(true) else { panic!("{:?}", sizes(true)) };
    assert_eq!(minimum, 1, "what is only read has no units");
}
