//! The phases of a job and what happens at certain times: the end of the ramp, samples, the end of the run, the drain, and
//! the read-back of verified writes.

use block_io::Op;
use os::clock;

use super::{Generator, NEVER};
use crate::access_pattern::OpMix;
use crate::direction_stats::DirectionStats;
use crate::result::{DepthCounts, Direction};
use crate::usage::Usage;

/// How long the drain waits for I/Os in flight before it counts them as never completed.
pub(super) const DRAIN_NS_MAX: u64 = 30_000_000_000;

/// The phases of a job, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum JobPhase {
    /// Nothing is submitted yet.
    NotStarted,
    /// `ramp_time`: I/O runs and is not measured.
    Ramp,
    /// I/O runs and is measured.
    Measuring,
    /// No new I/O starts; I/Os in flight complete and are counted.
    Draining,
    /// Written data is read back and verified.
    ReadingBack,
    /// No I/O is in flight, or the drain timed out.
    Finished,
}

impl Generator {
    pub(super) fn begin(&mut self, now: u64) {
        self.usage_start = Usage::now();
        self.start_ticks = now;
        if let Some(general) = &mut self.general {
            general.pauses.begin(now);
        }
        if self.spec.ramp_ns > 0 {
            self.phase = JobPhase::Ramp;
            self.event_ticks = now + clock::ns_to_ticks(self.spec.ramp_ns);
        } else {
            self.start_measuring(now);
        }
        if let Some(open_loop) = &mut self.open_loop {
            open_loop.schedule.begin(now);
        }
        if self.general.is_some() || self.open_loop.is_some() {
            self.idle.append(&mut self.ready);
            // Requests are taken from the end: tag 0 is used first.
            self.idle.reverse();
            return;
        }
        let count = self.take_remaining(self.ready.len());
        self.idle.extend(self.ready.drain(count..));
        self.assign_new(0, now, false);
        if self.ready.is_empty() {
            self.start_draining(now);
        }
    }

    pub(super) fn start_measuring(&mut self, now: u64) {
        self.phase = JobPhase::Measuring;
        self.start_ticks = now;
        if let Some(general) = &mut self.general {
            general.logs.begin();
        }
        let runtime = self.spec.runtime_ns.map(clock::ns_to_ticks);
        self.end_ticks = runtime.map_or(NEVER, |runtime| now.saturating_add(runtime));
        let sample = match self.spec.sample_ns {
            0 => NEVER,
            ns => now.saturating_add(clock::ns_to_ticks(ns)),
        };
        self.sample_ticks = sample;
        self.event_ticks = self.end_ticks.min(sample);
        if let Some(tuner) = self.general.as_mut().and_then(|general| general.tuner.as_mut()) {
            self.event_ticks = self.event_ticks.min(tuner.begin(now));
        }
        if let Some(steady) = &mut self.steady {
            self.event_ticks = self.event_ticks.min(steady.begin(now));
        }
        if let Some(timeline) = &mut self.timeline {
            self.event_ticks = self.event_ticks.min(timeline.begin(now));
        }
        if let Some(check) = &mut self.rate_minimum {
            self.event_ticks = self.event_ticks.min(check.begin(now));
        }
    }

    #[cold]
    pub(super) fn on_event(&mut self, now: u64) {
        match self.phase {
            JobPhase::Ramp => {
                self.ramp_blocks += self.measured_blocks();
                for stats in &mut self.stats {
                    stats.clear();
                }
                self.depths = DepthCounts::default();
                if let Some(general) = &mut self.general {
                    general.logs.clear();
                    if let Some(recorder) = &mut general.priorities {
                        recorder.clear();
                    }
                }
                self.usage_start = Usage::now();
                self.start_measuring(now);
            }
            JobPhase::Measuring if now >= self.end_ticks => self.stop_issuing(now),
            JobPhase::Measuring => self.sample_and_tune(now),
            _ => {}
        }
    }

    /// Takes the samples of IOPS and bandwidth that are due, lets the latency tuner choose a depth, and ends a job whose
    /// rate is steady.
    fn sample_and_tune(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        let mut tuner_ticks = NEVER;
        if now >= self.sample_ticks {
            let directions = self.spec.workload.directions(self.spec.read_percent);
            for index in (0..3).filter(|index| directions[*index]) {
                let (iops, rate) = self.stats[index].sample(elapsed_ns, self.block_bytes);
                if let Some(general) = &mut self.general {
                    general.logs.record_rates(elapsed_ns, index as u8, iops as u64, rate as u64);
                }
            }
            if let Some(general) = &mut self.general
                && general.logs.options.average_ns > 0
            {
                general.logs.end_window(elapsed_ns);
            }
            let step = clock::ns_to_ticks(self.spec.sample_ns).max(1);
            let missed = (now - self.sample_ticks) / step;
            self.sample_ticks = self.sample_ticks.saturating_add((missed + 1).saturating_mul(step));
        }
        if let Some(tuner) = self.general.as_mut().and_then(|general| general.tuner.as_mut()) {
            tuner_ticks = tuner.update(now);
        }
        let mut steady_ticks = NEVER;
        if let Some(steady) = &mut self.steady {
            let ios = self.stats[..3].iter().map(DirectionStats::ios).sum();
            let blocks: u64 = self.stats[..3].iter().map(|stats| stats.blocks).sum();
            let (attained, due) = steady.update(now, ios, blocks * u64::from(self.block_bytes));
            if attained {
                return self.stop_issuing(now);
            }
            steady_ticks = due;
        }
        let mut timeline_ticks = NEVER;
        if let Some(timeline) = &mut self.timeline {
            let completions = self.stats[..3].iter().map(|stats| &stats.completion_latency);
            timeline_ticks = timeline.update(now, elapsed_ns, completions);
        }
        let Some(minimum_ticks) = self.check_rate_minimum(now) else { return self.stop_issuing(now) };
        let samples = self.sample_ticks.min(tuner_ticks).min(steady_ticks).min(timeline_ticks);
        self.event_ticks = self.end_ticks.min(samples).min(minimum_ticks);
    }

    /// When the next cycle of `rate_min` ends; `None` if the rate was too low in the last one.
    fn check_rate_minimum(&mut self, now: u64) -> Option<u64> {
        let Some(check) = &mut self.rate_minimum else { return Some(NEVER) };
        let bytes = u64::from(self.block_bytes);
        let totals = [0, 1, 2].map(|index| (self.stats[index].ios(), self.stats[index].blocks * bytes));
        match check.update(now, totals) {
            Ok(due) => Some(due),
            Err(message) => {
                self.break_limit(Direction::Read as usize, || message);
                None
            }
        }
    }

    /// Handles timed events in a turn without completions.
    pub(super) fn on_idle(&mut self) {
        let now = clock::ticks();
        match self.phase {
            JobPhase::Ramp | JobPhase::Measuring if now >= self.event_ticks => self.on_event(now),
            JobPhase::Draining | JobPhase::ReadingBack if now >= self.event_ticks => {
                self.finish_phase(now);
                self.drain_timed_out = true;
                self.phase = JobPhase::Finished;
            }
            _ => {}
        }
    }

    /// Withdraws the ready requests and starts the drain; I/Os in flight are still counted.
    #[cold]
    pub(super) fn stop_issuing(&mut self, now: u64) {
        // Before the start no request has a position yet.
        if self.phase > JobPhase::NotStarted {
            if let Some(verifier) = &mut self.verifier {
                for request in self.ready.iter().filter(|request| request.op.has_range()) {
                    verifier
                        .release((request.lba - self.pattern.first_lba) / u64::from(self.pattern.io_blocks));
                }
            }
            if let Some(zoned) = self.general.as_mut().and_then(|general| general.zoned.as_mut()) {
                // From the last one on, so that the write pointers return to the first.
                for request in self.ready.iter().rev().filter(|request| request.op.has_range()) {
                    zoned.cancel(request, self.block_bytes);
                }
            }
            self.batches.cancel(&self.ready);
        }
        self.idle.append(&mut self.ready);
        self.start_draining(now);
    }

    /// Starts no new I/O; requests that are ready are still submitted.
    pub(super) fn start_draining(&mut self, now: u64) {
        self.phase = JobPhase::Draining;
        self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
    }

    /// No I/O is in flight: the job is finished, unless a flush or the read-back of verified writes is left.
    #[cold]
    pub(super) fn on_drained(&mut self) {
        if self.phase == JobPhase::Finished {
            return;
        }
        let now = clock::ticks();
        if self.phase == JobPhase::Draining {
            self.finish_phase(now);
            if self.submit_final_flush(now) {
                return;
            }
        }
        let writes = !matches!(self.pattern.mix, OpMix::Single(Op::Read | Op::Unmap));
        let verifies = self.verifier.is_some() && self.spec.reads_back;
        let read_back = self.phase == JobPhase::Draining && writes && verifies;
        if !read_back || self.stopped || self.errors > 0 {
            if self.phase == JobPhase::ReadingBack {
                self.finish_phase(now);
            }
            self.phase = JobPhase::Finished;
            return;
        }
        self.phase = JobPhase::ReadingBack;
        let reads = &mut self.stats[Direction::Read as usize];
        if reads.ios() == 0 {
            // It reads from now on, and not while it wrote.
            reads.result.elapsed_ns = 0;
        }
        (self.start_ticks, self.pattern.position) = (now, 0);
        self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        self.start_due_general(now);
    }

    /// Records the duration of the phase that ends now and, after the measured one, the processor usage.
    pub(super) fn finish_phase(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        if self.phase == JobPhase::ReadingBack {
            self.stats[Direction::Read as usize].result.elapsed_ns += elapsed_ns;
            return;
        }
        if let Some(general) = &mut self.general
            && general.logs.options.average_ns > 0
        {
            // As in fio, the last latencies are averaged over what is left of the interval.
            general.logs.end_window(elapsed_ns);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.end(elapsed_ns, self.stats[..3].iter().map(|stats| &stats.completion_latency));
        }
        for stats in &mut self.stats {
            stats.set_elapsed(elapsed_ns, self.block_bytes);
        }
        self.usage = Usage::now().since(self.usage_start);
    }
}
