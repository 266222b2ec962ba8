//! Monotonic time stamps that cost a few nanoseconds.
//!
//! On x86-64 the time-stamp counter (TSC) is read directly and scaled; elsewhere `CLOCK_MONOTONIC` is read.
//! The first call calibrates the scale in about 2 ms; a process can avoid that and [adopt](adopt_scale) the
//! scale of another process of the same machine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Fixed-point position of [`Calibration::scale`].
const SHIFT: u32 = 32;

#[derive(Clone, Copy)]
struct Calibration {
    /// Nanoseconds per tick, times 2^[`SHIFT`].
    scale: u64,
    origin_ticks: u64,
}

/// The current counter value in ticks. Only differences are meaningful, after conversion by [`ticks_to_ns`].
#[inline]
pub fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: RDTSC is part of x86-64 and reads nothing but the counter.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        monotonic_ns()
    }
}

/// Converts `ticks` to nanoseconds.
#[inline]
pub fn ticks_to_ns(ticks: u64) -> u64 {
    ((ticks as u128 * calibration().scale as u128) >> SHIFT) as u64
}

/// Converts `ns` nanoseconds to ticks.
pub fn ns_to_ticks(ns: u64) -> u64 {
    (((ns as u128) << SHIFT) / calibration().scale as u128) as u64
}

/// Nanoseconds since the first use of the clock in this process; monotonic on one core.
#[inline]
pub fn now_ns() -> u64 {
    calibration().now_ns()
}

impl Calibration {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.at_ticks(ticks())
    }

    #[inline]
    fn at_ticks(&self, ticks: u64) -> u64 {
        let since = ticks.saturating_sub(self.origin_ticks);
        ((since as u128 * self.scale as u128) >> SHIFT) as u64
    }
}

/// The clock of a core: this machine's, or a virtual one. Reading the machine's costs what [`now_ns`] costs.
#[derive(Clone)]
pub struct Clock(ClockSource);

#[derive(Clone)]
enum ClockSource {
    Monotonic(Calibration),
    Virtual(VirtualClock),
}

/// Time that its owner sets, for simulations. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl Clock {
    /// The machine's clock, which [`now_ns`] reads.
    pub fn monotonic() -> Clock {
        Clock(ClockSource::Monotonic(*calibration()))
    }

    /// The time in nanoseconds.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        match &self.0 {
            ClockSource::Monotonic(calibration) => calibration.now_ns(),
            ClockSource::Virtual(clock) => clock.now_ns(),
        }
    }

    /// The time in nanoseconds, for a caller that has just read [`ticks`].
    #[inline]
    pub fn at_ticks(&self, ticks: u64) -> u64 {
        match &self.0 {
            ClockSource::Monotonic(calibration) => calibration.at_ticks(ticks),
            ClockSource::Virtual(clock) => clock.now_ns(),
        }
    }

    /// Whether the time is virtual.
    pub fn is_virtual(&self) -> bool {
        matches!(self.0, ClockSource::Virtual(_))
    }
}

impl From<VirtualClock> for Clock {
    fn from(clock: VirtualClock) -> Clock {
        Clock(ClockSource::Virtual(clock))
    }
}

impl VirtualClock {
    /// The time in nanoseconds, from 0.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the time.
    ///
    /// # Panics
    /// If it would go back.
    pub fn advance_to(&self, now_ns: u64) {
        let before_ns = self.0.swap(now_ns, Ordering::Relaxed);
        assert!(before_ns <= now_ns, "virtual time goes back from {before_ns} ns to {now_ns} ns");
    }
}

static CALIBRATION: OnceLock<Calibration> = OnceLock::new();

#[inline]
fn calibration() -> &'static Calibration {
    CALIBRATION.get_or_init(calibrate)
}

/// The calibrated scale of this process, for [`adopt_scale`] in another process.
pub fn scale() -> u64 {
    calibration().scale
}

/// Uses the [`scale`] of another process of this machine, from the same boot, instead of calibrating.
/// Returns `false` if the clock has been used already or if the scale is implausible.
pub fn adopt_scale(scale: u64) -> bool {
    // Counters run at 100 MHz to 100 GHz.
    let plausible = (1 << SHIFT) / 100..=10 << SHIFT;
    let adopted = Calibration { scale, origin_ticks: ticks() };
    plausible.contains(&scale) && CALIBRATION.set(adopted).is_ok()
}

fn calibrate() -> Calibration {
    if cfg!(not(all(target_arch = "x86_64", not(miri)))) {
        return Calibration { scale: 1 << SHIFT, origin_ticks: ticks() };
    }
    // Each end is the tightest of 16 (ticks, time) pairs, so that an interruption between the two
    // reads does not distort the scale.
    let (start_ticks, start) = tightest_pair();
    while start.elapsed() < Duration::from_millis(2) {
        std::hint::spin_loop();
    }
    let (end_ticks, end) = tightest_pair();
    let elapsed_ns = end.duration_since(start).as_nanos() as u64;
    let elapsed_ticks = end_ticks.saturating_sub(start_ticks).max(1);
    Calibration {
        scale: ((elapsed_ns as u128) << SHIFT).div_euclid(elapsed_ticks as u128) as u64,
        origin_ticks: start_ticks,
    }
}

fn tightest_pair() -> (u64, Instant) {
    let mut best = (u64::MAX, ticks(), Instant::now());
    for _ in 0..16 {
        let before = ticks();
        let at = Instant::now();
        let width = ticks().saturating_sub(before);
        if width < best.0 {
            best = (width, before + width / 2, at);
        }
    }
    (best.1, best.2)
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn monotonic_ns() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// A time in seconds since 1970 as the machine's local time, in the form of C's `ctime`: `Sat Nov 28 05:35:18
/// 2026`. The zone is that of `TZ` or `/etc/localtime`.
pub fn local_time_text(unix_seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = libc::time_t::try_from(unix_seconds).unwrap_or(libc::time_t::MAX);
    let mut parts = std::mem::MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers are of live values of this frame, and `localtime_r` keeps neither.
    let converted = unsafe { libc::localtime_r(&seconds, parts.as_mut_ptr()) };
    if converted.is_null() {
        // The year does not fit its field.
        return format!("{unix_seconds} s since 1970");
    }
    // SAFETY: all fields are integers and a pointer, for which zeroes are valid too, and `localtime_r` has
    // set them.
    let parts = unsafe { parts.assume_init() };
    let name = |names: &'static [&'static str], index: i32| {
        usize::try_from(index).ok().and_then(|index| names.get(index)).copied().unwrap_or("???")
    };
    format!(
        "{} {} {:2} {:02}:{:02}:{:02} {}",
        name(&DAYS, parts.tm_wday),
        name(&MONTHS, parts.tm_mon),
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec,
        i64::from(parts.tm_year) + 1900
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "calls the C library")]
    fn a_local_time_has_the_form_of_ctime() {
        // Two days from any zone's end of a year.
        let text = local_time_text(1_700_000_000);
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let [day, month, number, time, year] = words[..] else { panic!("{text}") };
        assert!(["Tue", "Wed"].contains(&day) && ["14", "15"].contains(&number), "{text}");
        assert_eq!((month, year, text.len(), time.len()), ("Nov", "2023", 24, 8));
        assert!(local_time_text(u64::MAX).starts_with(&u64::MAX.to_string()));
        // A day of one digit is padded with a space.
        assert!([" 7", " 8"].contains(&&local_time_text(1_699_358_400)[8..10]));
    }

    #[test]
    fn agrees_with_the_monotonic_clock() {
        now_ns();
        let (start, reference) = (now_ns(), Instant::now());
        while reference.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let (measured, real) = (now_ns() - start, reference.elapsed().as_nanos() as u64);
        assert!(measured.abs_diff(real) < real / 20, "{measured} ns against {real} ns");
    }

    #[test]
    fn a_core_reads_the_machines_time_or_its_virtual_time() {
        let (before, machine) = (now_ns(), Clock::monotonic());
        assert!(machine.now_ns() >= before && machine.now_ns() <= now_ns() && !machine.is_virtual());
        let at_ns = machine.at_ticks(ticks());
        assert!(at_ns >= before && at_ns <= now_ns());
        let time = VirtualClock::default();
        let clock = Clock::from(time.clone());
        time.advance_to(7);
        assert!(clock.is_virtual() && clock.clone().now_ns() == 7 && clock.at_ticks(ticks()) == 7);
        assert!(std::panic::catch_unwind(|| time.advance_to(6)).is_err());
    }

    #[test]
    fn a_scale_is_adopted_only_before_first_use() {
        assert!(scale() > 0);
        for late_or_implausible in [scale(), 0, 1, u64::MAX] {
            assert!(!adopt_scale(late_or_implausible));
        }
    }

    #[test]
    fn conversions_are_inverse_within_a_tick() {
        for ns in [1, 1000, 1_000_000_000, 86_400_000_000_000] {
            assert!(ticks_to_ns(ns_to_ticks(ns)).abs_diff(ns) <= 2 + ns / 1_000_000, "{ns}");
        }
    }
}
