//! The least engine for fio that moves data: it copies the bytes of each I/O, and completes it when fio
//! reaps. What it costs is the floor of any engine whose devices have buffers of their own;
//! `./x bench fio-engine` compares Ringbolt's engine with it.
//!
//! ```text
//! cargo build --profile plugin -p ringbolt-fio-abi --example copy_engine
//! fio --name=job --ioengine=external:target/plugin/examples/libcopy_engine.so --filename=any --size=1g \
//!     --rw=randread --bs=4k --iodepth=32
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use fio_abi::{EngineDefinition, FinishedUnit, FioEngine, IoUnit, Queued, UnitKind, export_engine};

/// Bytes of its device.
const FILE_BYTES: u64 = 1 << 30;

/// One buffer for each I/O in flight, as a device has.
struct CopyEngine {
    in_flight: VecDeque<(IoUnit, Vec<u8>)>,
    free: Vec<Vec<u8>>,
}

impl FioEngine for CopyEngine {
    fn open(&mut self, _name: &str) -> Result<(), String> {
        Ok(())
    }

    fn close(&mut self, _name: &str) {}

    fn queue(&mut self, unit: IoUnit) -> Queued {
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.resize(unit.length() as usize, 0);
        if unit.kind() == UnitKind::Write {
            buffer.copy_from_slice(unit.data());
        }
        self.in_flight.push_back((unit, buffer));
        Queued::InFlight
    }

    fn commit(&mut self) {}

    fn reap(&mut self, _min: usize, max: usize, _limit: Option<Duration>, to: &mut Vec<FinishedUnit>) {
        while to.len() < max
            && let Some((mut unit, buffer)) = self.in_flight.pop_front()
        {
            if unit.kind() == UnitKind::Read {
                unit.data_mut().copy_from_slice(&buffer);
            }
            self.free.push(buffer);
            to.push(unit.finish(Ok(())));
        }
    }
}

static COPY: EngineDefinition = EngineDefinition {
    name: c"copy",
    options: &[],
    file_bytes: |_| Ok(FILE_BYTES),
    start: || Ok(Box::new(CopyEngine { in_flight: VecDeque::new(), free: Vec::new() })),
};

export_engine!(COPY);
