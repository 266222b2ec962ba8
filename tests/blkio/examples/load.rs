//! Random reads of a vhost-user block device by libblkio, as fast as one thread that never waits can have them.
//!
//! `load SOCKET DEPTH SECONDS` has DEPTH reads of 4 KiB in flight, prints their rate, and ends with an error if one fails.
//! `load SOCKET idle` prints `connected` and keeps the device open without a request until it is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use blkio_client::{BlkioDevice, BlkioError, BlkioOptions, BlkioRequest};

const BYTES: usize = 4096;
const DEPTH_MAX: usize = 256;
/// Not measured: caches and the target's polling settle.
const RAMP: Duration = Duration::from_millis(200);
/// Looks at the queue between two at the clock.
const LOOKS: usize = 64;

/// The places of the reads, as random as they have to be.
struct Places {
    state: u64,
    blocks: u64,
}

impl Places {
    /// Offset of the next read.
    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % self.blocks * BYTES as u64
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [socket, "idle"] => {
            let _device = BlkioDevice::open(Path::new(socket), &BlkioOptions::default())?;
            println!("connected");
            loop {
                std::thread::park();
            }
        }
        [socket, depth, seconds] => {
            let depth = depth.parse().ok().filter(|depth| (1..=DEPTH_MAX).contains(depth));
            let depth = depth.ok_or("DEPTH is a number from 1 to 256")?;
            let rate = measure(Path::new(socket), depth, Duration::from_secs_f64(seconds.parse()?))?;
            println!("read at depth {depth} by libblkio: {rate:.0} IOPS");
            Ok(())
        }
        _ => Err("usage: load SOCKET DEPTH SECONDS, or load SOCKET idle".into()),
    }
}

/// Reads a second.
fn measure(socket: &Path, depth: usize, time: Duration) -> Result<f64, BlkioError> {
    // A read takes three descriptors, and libblkio has no indirect ones.
    let queue_size = (3 * depth as u16).next_power_of_two();
    let options =
        BlkioOptions { queue_size, memory_bytes: (depth * BYTES) as u64, ..BlkioOptions::default() };
    let mut device = BlkioDevice::open(socket, &options)?;
    device.set_notified(0, false);
    let blocks = device.property("capacity")? / BYTES as u64;
    let mut places = Places { state: 88_172_645_463_325_252, blocks };
    let mut free: Vec<usize> = (0..depth).collect();
    let (mut begun, mut reads, mut is_measured) = (Instant::now(), 0, false);
    loop {
        for _ in 0..LOOKS {
            for tag in free.drain(..) {
                let (offset, at) = (places.next(), (tag * BYTES) as u64);
                device.submit(0, BlkioRequest::Read { offset, at, bytes: BYTES }, tag);
            }
            let mut failed = 0;
            reads += device.reap(0, 0, |completion| {
                free.push(completion.tag);
                failed |= completion.errno;
            })?;
            if failed != 0 {
                return Err(BlkioError::Request(failed));
            }
        }
        let elapsed = begun.elapsed();
        if !is_measured && elapsed > RAMP {
            (begun, reads, is_measured) = (Instant::now(), 0, true);
        } else if is_measured && elapsed > time {
            return Ok(reads as f64 / elapsed.as_secs_f64());
        }
    }
}
