//! Opens an NVMe controller, prints its registers, and executes Identify by DMA.
//!
//! ```text
//! registers 0000:00:04.0 [group|iommufd|noiommu|uio]   # CAP, VS, then Identify by DMA, then a reset
//! registers --watch ADDRESS                            # until that function was removed and added again
//! ```
//!
//! `tests/vm` runs it to test this crate with real kernel interfaces. Each line of its output is `name value`.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use dma::{Arena, DeviceBuffer, Pool, SharedRegion};
use pci::{HotplugEvent, HotplugMonitor, PciAddress, PciBackend, PciFunction, Sysfs, UeventKind};
use rustix::event::{PollFd, PollFlags, poll};

type Failure = Box<dyn std::error::Error>;

/// Offsets of controller registers (NVMe base specification 2.0, figure 35).
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["--watch", address] => address.parse().map_err(Failure::from).and_then(watch),
        [address] => address.parse().map_err(Failure::from).and_then(|address| show(address, None)),
        [address, backend] => address.parse().map_err(Failure::from).and_then(|address| {
            let backend = match backend {
                "group" => PciBackend::VfioGroup,
                "iommufd" => PciBackend::VfioCdev,
                "noiommu" => PciBackend::VfioNoIommu,
                "uio" => PciBackend::Uio,
                _ => return Err("the backend is group, iommufd, noiommu or uio".into()),
            };
            show(address, Some(backend))
        }),
        _ => Err("registers ADDRESS [group|iommufd|noiommu|uio], or --watch ADDRESS".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("registers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn show(address: PciAddress, backend: Option<PciBackend>) -> Result<(), Failure> {
    let function = PciFunction::open(&Sysfs::default(), address, backend)?;
    println!("backend {}", function.backend());
    println!("present {}", function.is_present());
    let registers = function.map_bar(0)?;
    println!("bar0 {}", registers.len());
    println!("cap {:#018x}", capabilities(&registers));
    println!("vs {:#010x}", registers.load_u32(VS));
    match PciFunction::open(&Sysfs::default(), address, backend) {
        Ok(_) => return Err("the function was opened twice".into()),
        Err(error) => println!("again {error}"),
    }

    let arena = Arena::new(dma::ArenaConfig { limit_bytes: 4 << 20, hugepages: true, shared: false });
    identify(&function, &registers, &Pool::new(&arena))?;
    function.reset()?;
    println!("reset {}", registers.load_u32(CC) & 1 == 0);
    let mut command = [0; 2];
    function.read_config(4, &mut command)?;
    println!("command {:#06x}", u16::from_le_bytes(command));
    Ok(())
}

fn capabilities(registers: &SharedRegion) -> u64 {
    u64::from(registers.load_u32(CAP + 4)) << 32 | u64::from(registers.load_u32(CAP))
}

/// Enables the controller with the admin queues and sends Identify: the device reads the command from our memory, and
/// writes the data, the completion and an interrupt.
fn identify(function: &PciFunction, registers: &SharedRegion, pool: &Pool) -> Result<(), Failure> {
    let take = || pool.take(4096).map(DeviceBuffer::new).ok_or("no memory");
    let (submission, completion, data) = (take()?, take()?, take()?);
    let device_address = |part: &DeviceBuffer| -> Result<u64, Failure> {
        let chunk = part.buffer().chunk().ok_or("the buffer has no chunk")?;
        let start = function.map_dma(&chunk)?;
        Ok(start + (part.as_ptr().addr() - chunk.start.addr()) as u64)
    };
    let (submission_queue, completion_queue, page) =
        (device_address(&submission)?, device_address(&completion)?, device_address(&data)?);
    println!("dma {page:#x} {}", if page == data.as_ptr().addr() as u64 { "identity" } else { "translated" });

    function.enable_bus_master()?;
    let interrupts = function.interrupts_max()?;
    println!("interrupts {interrupts}");
    let events = if interrupts > 0 { function.enable_interrupts(2.min(interrupts))? } else { Vec::new() };

    registers.store_u32(CC, 0);
    until(|| registers.load_u32(CSTS) & 1 == 0)?;
    registers.store_u32(AQA, 15 << 16 | 15);
    for (register, value) in [(ASQ, submission_queue), (ACQ, completion_queue)] {
        registers.store_u32(register, value as u32);
        registers.store_u32(register + 4, (value >> 32) as u32);
    }
    // 64-byte SQEs, 16-byte CQEs, 4 KiB pages, enabled.
    registers.store_u32(CC, 4 << 20 | 6 << 16 | 1);
    until(|| registers.load_u32(CSTS) & 1 == 1)?;

    // Identify with CNS 1: the controller data structure.
    submission.store_u32(0, 0x06);
    submission.store_u64(24, page);
    submission.store_u32(40, 1);
    registers.store_u32(DOORBELLS, 1);
    until(|| completion.load_u16(14) & 1 == 1)?;
    println!("status {:#x}", completion.load_u16(14) >> 1);
    for (name, offset, length) in [("serial", 4, 20), ("model", 24, 40)] {
        let mut text = vec![0; length];
        data.read(offset, &mut text);
        println!("{name} {}", String::from_utf8_lossy(&text).trim());
    }
    if let Some(event) = events.first() {
        let mut watched = [PollFd::new(event, PollFlags::IN)];
        let timeout = Duration::from_secs(5).try_into()?;
        println!("interrupted {}", poll(&mut watched, Some(&timeout))? == 1);
    }
    registers.store_u32(CC, 0);
    until(|| registers.load_u32(CSTS) & 1 == 0)?;
    function.disable_interrupts()?;
    function.disable_bus_master()?;
    for part in [&submission, &data] {
        let chunk = part.buffer().chunk().ok_or("the buffer has no chunk")?;
        // The second buffer is in the same chunk, which is no longer mapped.
        println!("unmapped {}", function.unmap_dma(&chunk).is_ok());
    }
    Ok(())
}

/// Waits for the device, at most 10 s.
fn until(mut done: impl FnMut() -> bool) -> Result<(), Failure> {
    let started = Instant::now();
    while !done() {
        if started.elapsed() > Duration::from_secs(10) {
            return Err("the controller did not answer within 10 s".into());
        }
        std::hint::spin_loop();
    }
    Ok(())
}

/// Prints the events of a function until it was removed and added again.
fn watch(address: PciAddress) -> Result<(), Failure> {
    let mut hotplug = HotplugMonitor::new()?;
    println!("watching {address}");
    let mut removed = false;
    loop {
        let mut watched = [PollFd::from_borrowed_fd(hotplug.as_fd(), PollFlags::IN)];
        poll(&mut watched, None)?;
        while let Some(notice) = hotplug.receive()? {
            let HotplugEvent::Function(event) = notice else { continue };
            if event.address != address {
                continue;
            }
            println!("{:?} {:06x}", event.kind, event.class.unwrap_or(0));
            removed |= event.kind == UeventKind::Remove;
            if removed && event.kind == UeventKind::Add {
                return Ok(());
            }
        }
    }
}
