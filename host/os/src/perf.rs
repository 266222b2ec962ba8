//! Performance counters of the CPU and the kernel: `perf_event_open(2)`.
//!
//! A [`PerfEvent`] counts one event of a thread, a process tree or a CPU; with a frequency it also records
//! call-chain samples in a [`SampleRing`], which is read without a system call. [`InstructionCounter`] counts
//! the instructions of the calling thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

mod samples;

pub use samples::SampleRing;

/// `struct perf_event_attr`, version 5 (112 bytes), which every kernel since 4.1 accepts.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    /// The period, or the frequency with the flag FREQUENCY.
    sample: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
    config2: u64,
    branches: u64,
    registers_user: u64,
    stack_user: u32,
    clock: i32,
    registers_interrupt: u64,
    aux_watermark: u32,
    stack_max: u16,
    reserved: u16,
}

const _: () = assert!(size_of::<Attributes>() == 112);

const DISABLED: u64 = 1;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const FREQUENCY: u64 = 1 << 10;
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
/// `PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING`.
const WITH_TIMES: u64 = 3;
/// `PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_CALLCHAIN`.
const WITH_CHAIN: u64 = 1 | 1 << 1 | 1 << 5;
/// `_IO('$', 0)` and `_IO('$', 1)`.
const ENABLE: libc::Ioctl = 0x2400;
const DISABLE: libc::Ioctl = 0x2401;

/// The counted event, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfKind {
    /// Hardware: 0 cycles, 1 instructions, 2 last-level cache references, 3 last-level cache misses.
    Hardware(u64),
    /// Software: 0 CPU clock, 1 task clock, 3 context switches, 4 CPU migrations.
    Software(u64),
}

/// The thread, process or CPU whose events are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfTarget {
    /// The calling thread.
    ThisThread,
    /// The process with this identifier, and the threads and processes that it starts from now on.
    ProcessTree(u32),
    /// The CPU with this index, for all processes.
    Cpu(u32),
}

/// Configuration of a [`PerfEvent`].
#[derive(Clone, Copy, Debug)]
pub struct PerfConfig {
    /// The event.
    pub kind: PerfKind,
    /// The thread, process or CPU.
    pub target: PerfTarget,
    /// Whether to exclude kernel and hypervisor.
    pub user_only: bool,
    /// Samples per second, 0 for none. An event with samples starts disabled; see [`PerfEvent::set_enabled`].
    pub frequency_hz: u64,
}

/// An open performance counter.
#[derive(Debug)]
pub struct PerfEvent(OwnedFd);

/// A counter value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerfCount {
    /// The count, not scaled for multiplexing.
    pub raw: u64,
    /// Nanoseconds for which it was enabled.
    pub enabled_ns: u64,
    /// Nanoseconds for which it counted: less than `enabled_ns` if the kernel multiplexed counters.
    pub running_ns: u64,
}

impl PerfEvent {
    /// Opens a counter; in the group of `leader`, if given, so that both count at the same times.
    ///
    /// # Errors
    /// The kernel's error: `ENOENT` or `EOPNOTSUPP` for an event that this machine does not support, `EACCES`
    /// or `EPERM` without permission (`kernel.perf_event_paranoid`), `ESRCH` for a process that does not exist.
    pub fn open(config: &PerfConfig, leader: Option<&PerfEvent>) -> io::Result<PerfEvent> {
        let (kind, number) = match config.kind {
            PerfKind::Hardware(number) => (0, number),
            PerfKind::Software(number) => (1, number),
        };
        let no_such_target = |_| io::Error::from_raw_os_error(libc::ESRCH);
        let (process, cpu, inherit) = match config.target {
            PerfTarget::ThisThread => (0, -1, 0),
            PerfTarget::ProcessTree(process) => {
                (libc::pid_t::try_from(process).map_err(no_such_target)?, -1, INHERIT)
            }
            PerfTarget::Cpu(cpu) => (-1, libc::c_int::try_from(cpu).map_err(no_such_target)?, 0),
        };
        let user_only = if config.user_only { EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR } else { 0 };
        let samples = config.frequency_hz > 0;
        let attributes = Attributes {
            kind,
            size: size_of::<Attributes>() as u32,
            config: number,
            sample: config.frequency_hz,
            sample_type: if samples { WITH_CHAIN } else { 0 },
            read_format: WITH_TIMES,
            flags: inherit | user_only | if samples { DISABLED | FREQUENCY } else { 0 },
            ..Attributes::default()
        };
        let group = leader.map_or(-1, |leader| leader.0.as_raw_fd());
        // SAFETY: the structure lives across the call and contains its size, which bounds what the kernel reads.
        let number = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                process,
                cpu,
                group,
                CLOSE_ON_EXEC,
            )
        };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this new descriptor, which has no other owner.
        Ok(PerfEvent(unsafe { OwnedFd::from_raw_fd(number as i32) }))
    }

    /// Enables or disables the counter.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_enabled(&self, on: bool) -> io::Result<()> {
        // SAFETY: the request takes no pointer.
        let status = unsafe { libc::ioctl(self.0.as_raw_fd(), if on { ENABLE } else { DISABLE }, 0) };
        if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads the counter; one system call.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&self) -> io::Result<PerfCount> {
        let mut bytes = [0; 24];
        let length = rustix::io::read(&self.0, &mut bytes)?;
        if length != bytes.len() {
            return Err(io::Error::other(format!(
                "read {length} bytes of a counter instead of {}",
                bytes.len()
            )));
        }
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        Ok(PerfCount { raw: word(0), enabled_ns: word(8), running_ns: word(16) })
    }
}

/// A counter of the instructions that the calling thread executes in user mode.
///
/// A read is a system call of some hundred nanoseconds: use it for measurements only.
#[derive(Debug)]
pub struct InstructionCounter(PerfEvent);

impl InstructionCounter {
    /// Starts to count the instructions of the calling thread.
    ///
    /// # Errors
    /// If the machine has no such counter, as many virtual machines, or if `kernel.perf_event_paranoid` is above 2.
    pub fn for_this_thread() -> io::Result<InstructionCounter> {
        let config = PerfConfig {
            kind: PerfKind::Hardware(1),
            target: PerfTarget::ThisThread,
            user_only: true,
            frequency_hz: 0,
        };
        PerfEvent::open(&config, None).map(InstructionCounter)
    }

    /// Instructions since it was created; 0 if the read fails.
    pub fn count(&self) -> u64 {
        self.0.read().map_or(0, |count| count.raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement perf events")]
    fn instructions_are_counted_or_open_fails() {
        match InstructionCounter::for_this_thread() {
            Ok(counter) => {
                let before = counter.count();
                std::hint::black_box((0..1000u64).map(std::hint::black_box).sum::<u64>());
                assert!(counter.count() - before > 1000);
            }
            Err(error) => {
                println!("SKIPPED: no instruction counter here: {error}");
                assert!(error.raw_os_error().is_some());
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement perf events")]
    fn samples_of_this_cpu_are_drained() {
        let cpu = rustix::thread::sched_getcpu() as u32;
        crate::pin_thread_to(cpu).unwrap();
        let config = PerfConfig {
            kind: PerfKind::Software(0),
            target: PerfTarget::Cpu(cpu),
            user_only: false,
            frequency_hz: 997,
        };
        let event = match PerfEvent::open(&config, None) {
            Ok(event) => event,
            Err(error) => return println!("SKIPPED: sampling is not allowed here: {error}"),
        };
        let mut samples = SampleRing::new(event, 8).unwrap();
        let count = |samples: &mut SampleRing| {
            let mut records = 0;
            samples.drain(&mut |record| {
                assert!(record.len() >= 8 && record.len() % 8 == 0, "{record:?}");
                records += 1;
            });
            records
        };
        assert_eq!(count(&mut samples), 0, "a sampling event starts disabled");
        samples.event().set_enabled(true).unwrap();
        let began = std::time::Instant::now();
        let mut seen = 0;
        // Far more samples than the ring can store, so that records wrap around.
        while seen < 400 && began.elapsed().as_secs() < 20 {
            std::hint::black_box((0..100_000u64).map(std::hint::black_box).sum::<u64>());
            seen += count(&mut samples);
        }
        assert!(seen >= 400, "{seen} samples in {:?}", began.elapsed());
    }
}
