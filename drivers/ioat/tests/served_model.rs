//! The driver against the software model behind vfio-user, in a thread of its own: through a socket and
//! shared memory.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dma::{Arena, ArenaConfig, Buffer, DeviceAddresses, Pool};
use ioat::{
    FunctionDevice, IoatAddress, IoatChannel, IoatCompletion, IoatError, IoatFailure, IoatFunction,
    IoatMemoryError, IoatOp, IoatRequest,
};
use ioat_model::{IoatFault, IoatModel, IoatServer, StopHandle};
use wire_ioat::{ChannelErrors, registers};

struct Served {
    path: PathBuf,
    stop: StopHandle,
    thread: Option<JoinHandle<IoatModel>>,
}

impl Served {
    fn new(faults: &[IoatFault]) -> Served {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ringbolt-ioat-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let mut model = IoatModel::new();
        faults.iter().for_each(|fault| model.inject(*fault));
        let server = IoatServer::bind(&path, model).unwrap();
        let stop = server.stop_handle();
        let thread = Some(std::thread::spawn(move || server.run().unwrap()));
        Served { path, stop, thread }
    }

    fn address(&self) -> IoatAddress {
        IoatAddress::VfioUser(self.path.clone())
    }

    /// Ends the server, and returns the model as it was.
    fn stop(&mut self) -> IoatModel {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn pool(shared: bool) -> Pool {
    Pool::new(&Arena::new(ArenaConfig { limit_bytes: 8 << 20, hugepages: false, shared }))
}

fn now_ns() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

struct Driver {
    channel: IoatChannel<FunctionDevice, u64>,
    addresses: DeviceAddresses<IoatFunction>,
    pool: Pool,
}

impl Driver {
    fn new(served: &Served) -> Driver {
        let (pool, function) = (pool(true), IoatFunction::open(&served.address()).unwrap());
        let addresses = DeviceAddresses::new(&function, pool.arena(), 4096);
        let device = FunctionDevice::new(function, &pool).unwrap();
        let channel = IoatChannel::start(device, now_ns()).unwrap();
        Driver { channel, addresses, pool }
    }

    /// Polls until it is ready or has failed, and nothing is in flight or it has failed.
    fn settle(&mut self) -> Vec<IoatCompletion<u64>> {
        let (mut sink, begun) = (Vec::new(), Instant::now());
        while self.channel.failure().is_none() && (!self.channel.is_ready() || self.channel.in_flight() > 0) {
            self.channel.poll(now_ns(), &mut sink);
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", self.channel.failure());
        }
        sink
    }

    fn buffer(&self, bytes: usize, fill: impl Fn(usize) -> u8) -> Buffer {
        let mut buffer = self.pool.take(bytes).unwrap();
        buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = fill(at));
        buffer
    }

    fn copy(&mut self, owned: u64, from: &Buffer, to: &Buffer) -> IoatRequest<u64> {
        let bytes = to.len() as u64;
        let [from, to] = [from, to].map(|buffer| self.addresses.locate(buffer).unwrap().unwrap());
        IoatRequest { op: IoatOp::Copy { from, to, bytes }, owned }
    }
}

#[test]
fn copies_and_fills_reach_memory_and_interrupts_are_off() {
    let mut served = Served::new(&[]);
    let mut driver = Driver::new(&served);
    assert!(driver.settle().is_empty() && driver.channel.is_ready());
    let (from, to) = (driver.buffer(100_000, |at| (at * 7) as u8), driver.buffer(100_000, |_| 0xee));
    let filled = driver.buffer(5000, |_| 0xee);
    let copy = driver.copy(1, &from, &to);
    let at = driver.addresses.locate(&filled).unwrap().unwrap();
    let fill = IoatOp::Fill { pattern: 0x0807_0605_0403_0201, to: at, bytes: 4998 };
    driver.channel.submit(&mut vec![copy, IoatRequest { op: fill, owned: 2 }]);
    let done = driver.settle();
    assert_eq!(done, [1, 2].map(|owned| IoatCompletion { owned, result: Ok(()) }));
    assert!(from.as_slice() == to.as_slice());
    let expected = |at: usize| if at < 4998 { (at % 8 + 1) as u8 } else { 0xee };
    assert!(filled.as_slice().iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    // One to start with, 25 of the copy, two of the fill.
    let model = served.stop();
    assert_eq!((model.executed_total(), model.read(registers::INTERRUPT_CONTROL, 1)), (28, 0));
}

#[test]
fn a_ring_that_wraps_executes_all_in_order() {
    let served = Served::new(&[]);
    let mut driver = Driver::new(&served);
    driver.settle();
    let (from, to) = (driver.buffer(4096, |at| at as u8), driver.buffer(4096, |_| 0));
    let mut batch: Vec<_> = (0..3000).map(|owned| driver.copy(owned, &from, &to)).collect();
    let mut done = Vec::new();
    while done.len() < 3000 {
        driver.channel.submit(&mut batch);
        done.extend(driver.settle());
    }
    assert!(done.iter().enumerate().all(|(at, one)| one.owned == at as u64 && one.result.is_ok()));
    assert!(from.as_slice() == to.as_slice());
}

#[test]
fn an_engine_that_halts_is_reset_and_works_again() {
    let served = Served::new(&[IoatFault::HaltEvery(3)]);
    let mut driver = Driver::new(&served);
    driver.settle();
    let (from, to) = (driver.buffer(8, |at| at as u8 + 1), driver.buffer(8, |_| 0));
    let mut batch: Vec<_> = (0..3).map(|owned| driver.copy(owned, &from, &to)).collect();
    driver.channel.submit(&mut batch);
    let results: Vec<_> = driver.settle().into_iter().map(|one| one.result).collect();
    let halted = Err(IoatError::Halted(ChannelErrors::READ_DATA));
    assert_eq!(results, [Ok(()), halted, Err(IoatError::Aborted)]);
    assert!(driver.channel.is_ready() && from.as_slice() == to.as_slice());
    assert_eq!(driver.channel.resets(), 2);
}

#[test]
fn memory_that_is_not_mapped_is_never_reached() {
    let served = Served::new(&[]);
    let mut driver = Driver::new(&served);
    driver.settle();
    let to = driver.buffer(8, |_| 7);
    let at = driver.addresses.locate(&to).unwrap().unwrap();
    for (from, to, errors) in
        [(8, at, ChannelErrors::SOURCE_ADDRESS), (at, u64::MAX - 63, ChannelErrors::DESTINATION_ADDRESS)]
    {
        let op = IoatOp::Copy { from, to, bytes: 8 };
        driver.channel.submit(&mut vec![IoatRequest { op, owned: 0 }]);
        assert_eq!(driver.settle()[0].result, Err(IoatError::Halted(errors)));
    }
    assert_eq!(to.as_slice(), [7; 8]);
}

#[test]
fn a_server_that_ends_fails_the_channel_and_its_dma_is_over() {
    let mut served = Served::new(&[IoatFault::StopAfter(2)]);
    let mut driver = Driver::new(&served);
    driver.settle();
    let (from, to) = (driver.buffer(8, |_| 1), driver.buffer(8, |_| 0));
    let mut batch = vec![driver.copy(1, &from, &to), driver.copy(2, &from, &to)];
    driver.channel.submit(&mut batch);
    let mut sink = Vec::new();
    while sink.is_empty() {
        driver.channel.poll(now_ns(), &mut sink);
    }
    served.stop();
    assert!(driver.settle().is_empty());
    // All registers read as ones.
    assert_eq!(driver.channel.failure(), Some(IoatFailure::State(7)));
    let (device, owned) = driver.channel.into_parts();
    assert_eq!((device.disable_dma(), owned), (Ok(()), vec![2]));
}

#[test]
fn what_cannot_be_opened_says_why() {
    let missing = IoatFunction::open(&IoatAddress::VfioUser("/nowhere/ioat0".into()));
    let text = missing.err().unwrap().to_string();
    assert!(text.contains("vfio-user:/nowhere/ioat0") && text.contains("No such file"), "{text}");
    let served = Served::new(&[]);
    let function = IoatFunction::open(&served.address()).unwrap();
    let Err(error) = FunctionDevice::new(function, &pool(false)) else { panic!("private memory was mapped") };
    assert!(matches!(error, IoatMemoryError::Dma(_)));
    assert!(error.to_string().contains("--shared-memory"), "{error}");
}
