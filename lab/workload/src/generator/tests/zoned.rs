//! Jobs on zones, over a device that fails writes which are not at a write pointer.

use std::sync::Mutex;

use super::*;
use crate::spec::BlockSizes;
use crate::zoned::{Placement, ZoneCommands, ZonedDevice, ZonedOptions};

/// A device of zones of 16 KiB that fails each I/O which its write pointers do not permit.
struct StrictDevice {
    pointers: Arc<Mutex<Vec<u64>>>,
    device: FakeDevice,
}

/// Resets its zones.
#[derive(Debug)]
struct StrictZones(Arc<Mutex<Vec<u64>>>);

const ZONE_BLOCKS: u64 = 32;
const ZONE_BYTES: u64 = ZONE_BLOCKS * BLOCK as u64;

impl ZoneCommands for StrictZones {
    fn reset(&self, start: u64, length: u64) -> std::io::Result<()> {
        assert_eq!((start % ZONE_BYTES, length), (0, ZONE_BYTES));
        self.0.lock().unwrap()[(start / ZONE_BYTES) as usize] = start / BLOCK as u64;
        Ok(())
    }

    fn pointer(&self, _: u64) -> std::io::Result<u64> {
        panic!("no write fails")
    }
}

impl Channel for StrictDevice {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        self.device.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.device.queue.len().div_ceil(2);
        let mut pointers = self.pointers.lock().unwrap();
        for request in self.device.queue.drain(..count) {
            let start = request.lba / ZONE_BLOCKS * ZONE_BLOCKS;
            let pointer = &mut pointers[(request.lba / ZONE_BLOCKS) as usize];
            let end = request.lba + u64::from(request.blocks);
            let is_permitted = match request.op {
                Op::Write => request.lba == *pointer && end <= start + ZONE_BLOCKS,
                Op::Unmap => request.lba == start && u64::from(request.blocks) == ZONE_BLOCKS,
                _ => end <= *pointer,
            };
            match request.op {
                Op::Write => *pointer = end,
                Op::Unmap => *pointer = start,
                _ => {}
            }
            sink.push(request.complete(if is_permitted { Status::SUCCESS } else { Status::WRITE_FAULT }));
        }
        count
    }
}

#[test]
fn jobs_on_zones_keep_to_the_write_pointers() {
    let two_sizes = BlockSizes::Split(vec![(512, 50), (1536, 50)]);
    for (workload, number, sizes, open_max) in [
        (Workload::RandWrite, 600, None, 0),
        (Workload::RandWrite, 600, None, 3),
        (Workload::RandRw, 600, None, 2),
        (Workload::Write, 600, None, 1),
        (Workload::ReadWrite, 600, None, 0),
        (Workload::RandWrite, 600, Some(two_sizes), 3),
    ] {
        let case = format!("{workload:?} with {open_max} open zones");
        let options = ZonedOptions { zone_bytes: Some(ZONE_BYTES), open_max, ..Default::default() };
        let pointers = Arc::new(Mutex::new((0..16).map(|zone| zone * ZONE_BLOCKS).collect()));
        let commands = Box::new(StrictZones(pointers.clone()));
        let zoned = ZonedDevice::of_test(16 * ZONE_BYTES, &options, commands);
        let (min_bytes, block_bytes) = if sizes.is_some() { (512, 1536) } else { (1024, 1024) };
        let job = zoned.join(&options, 0..16 * ZONE_BYTES, [min_bytes; 3], true).unwrap();
        let sizes = sizes.map(|sizes| Box::new([sizes.clone(), sizes.clone(), sizes]));
        let zoned = Some(Box::new(options));
        let spec = JobSpec { zoned, number_ios: Some(number), block_bytes, sizes, ..spec(workload) };
        let mut generator = start(spec, 16 * ZONE_BLOCKS);
        generator.join_zones(job);
        let mut device = StrictDevice { pointers, device: FakeDevice::new(0, 64) };
        while !generator.is_finished() {
            generator.turn(&mut device);
        }
        let result = generator.into_result();
        assert!(result.is_clean(), "{case}: {:?} {:?}", result.failures, result.broken_limit);
        assert_eq!(result.total_ios(), number, "{case}");
        // 300 to 600 KiB are written to 256.
        assert!(result.zone_resets > Some(0), "{case}");
    }
}

#[test]
fn a_sequential_read_passes_zones_without_data() {
    let options = ZonedOptions { zone_bytes: Some(ZONE_BYTES), ..Default::default() };
    let pointers = Arc::new(Mutex::new((0..4).map(|zone| zone * ZONE_BLOCKS).collect()));
    let zones = ZonedDevice::of_test(4 * ZONE_BYTES, &options, Box::new(StrictZones(pointers.clone())));
    // The first zone has 5 KiB, the third 16 KiB.
    let mut writer = zones.join(&options, 0..4 * ZONE_BYTES, [1024; 3], true).unwrap();
    for (zone, bytes) in [(0, 5 << 10), (2, ZONE_BYTES)] {
        assert_eq!(
            writer.place(Op::Write, zone * ZONE_BYTES, bytes, true),
            Placement::At(zone * ZONE_BYTES, bytes)
        );
        writer.completed(Op::Write, zone * ZONE_BYTES, true);
        pointers.lock().unwrap()[zone as usize] += bytes / BLOCK as u64;
    }
    let job = zones.join(&options, 0..4 * ZONE_BYTES, [1024; 3], false).unwrap();
    let mut generator =
        start(JobSpec { zoned: Some(Box::new(options)), ..spec(Workload::Read) }, 4 * ZONE_BLOCKS);
    generator.join_zones(job);
    let mut device = StrictDevice { pointers, device: FakeDevice::new(0, 64) };
    while !generator.is_finished() {
        generator.turn(&mut device);
    }
    let result = generator.into_result();
    assert_eq!((result.errors, result.total_ios()), (0, 5 + 16));
}
