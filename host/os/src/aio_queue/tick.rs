//! A timer whose expiry is an event of an AIO context.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::{AioContext, Iocb};
use crate::requests::TICK_NS;

/// The `data` of the timer's event; no tag is so large.
pub(super) const TICK: u64 = u64::MAX;
/// `IOCB_CMD_POLL` (Linux 4.19): the event of a descriptor, as in `poll`.
const POLL: u16 = 5;

/// Ends waits of a context after [`TICK_NS`] at the latest.
///
/// A wait then sets no timer of its own, which would cost as much as the rest of the wait in a virtual machine. One
/// event in 20 ms pays for all waits in that time.
#[derive(Default)]
pub(super) struct Tick {
    timer: Option<OwnedFd>,
    in_flight: bool,
    unavailable: bool,
}

impl Tick {
    /// Starts the timer unless it runs; returns false if the kernel cannot.
    #[inline]
    pub(super) fn start(&mut self, context: &mut AioContext) -> bool {
        if !self.in_flight && !self.unavailable {
            self.in_flight = self.submit(context).is_some();
            self.unavailable = !self.in_flight;
        }
        self.in_flight
    }

    #[cold]
    fn submit(&mut self, context: &mut AioContext) -> Option<()> {
        if self.timer.is_none() {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            self.timer = Some(timerfd_create(TimerfdClockId::Monotonic, flags).ok()?);
        }
        let timer = self.timer.as_ref()?;
        let once = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec { tv_sec: 0, tv_nsec: TICK_NS as i64 },
        };
        // Setting it also clears the expiry before.
        timerfd_settime(timer, TimerfdTimerFlags::empty(), &once).ok()?;
        let fd = timer.as_raw_fd() as u32;
        let iocb = Iocb { data: TICK, opcode: POLL, fd, address: libc::POLLIN as u64, ..Iocb::default() };
        let submitted = context.submit(&[(&raw const iocb).expose_provenance() as u64]);
        (submitted.ok()? == 1).then_some(())
    }

    /// The event of the timer has been received.
    pub(super) fn ended(&mut self) {
        self.in_flight = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aio_queue::IoEvent;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement Linux AIO")]
    fn every_start_leads_to_one_event() {
        let mut context = AioContext::new(1).unwrap();
        let (mut tick, mut events) = (Tick::default(), [IoEvent::default(); 2]);
        for _ in 0..3 {
            assert!(tick.start(&mut context));
            assert!(tick.start(&mut context), "it runs already");
            assert_eq!(context.get_events(1, &mut events, None), 1);
            assert_eq!(events[0].data, TICK);
            tick.ended();
        }
        assert_eq!(context.get_events(0, &mut events, Some(0)), 0);
    }
}
