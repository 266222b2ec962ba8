//! Measurements in addition to the generator's results.

use std::time::Instant;

use perf_counters::{
    CounterEvent, CounterValue, CpuProfiler, ProcessCounters, SymbolClasses, SystemCounters,
};

use crate::capabilities::NetworkTarget;
use crate::cpu_time::CpuTimeSampler;
use crate::host::HostInfo;
use crate::kyber_tokens::KyberTokenMeter;
use crate::record::{CellRecord, RoleRecord};

/// The additional measurements of one cell. [`CellMeters::open`] comes before the generator starts, then
/// [`CellMeters::start`], [`CellMeters::start_measuring`] after the ramp, [`CellMeters::sample`] a few times a
/// second, and [`CellMeters::finish`].
pub(crate) struct CellMeters<'a> {
    host: &'a HostInfo,
    cpus: &'a [u32],
    wants: &'a [String],
    process_counters: Option<CounterInterval<ProcessCounters>>,
    system_counters: Option<CounterInterval<SystemCounters>>,
    profile: Option<CpuProfiler>,
    tokens: Option<KyberTokenMeter>,
    /// Requested measurements that are not available, with the reason.
    missing: Vec<String>,
    generator_sampler: Option<CpuTimeSampler<'a>>,
    /// Samples the target's process, if the cell drives one.
    target_sampler: Option<CpuTimeSampler<'a>>,
    has_target: bool,
    measuring: bool,
}

impl<'a> CellMeters<'a> {
    /// `wants` are the measurements that the definition requests, `cpus` those that the cell may use.
    pub(crate) fn new(host: &'a HostInfo, wants: &'a [String], cpus: &'a [u32]) -> CellMeters<'a> {
        CellMeters {
            host,
            cpus,
            wants,
            process_counters: None,
            system_counters: None,
            profile: None,
            tokens: None,
            missing: Vec::new(),
            generator_sampler: None,
            target_sampler: None,
            has_target: false,
            measuring: false,
        }
    }

    fn wants(&self, what: &str) -> bool {
        self.wants.iter().any(|name| name == what)
    }

    /// Starts sampling the generator's process.
    pub(crate) fn start(&mut self, process: u32, target_sampler: Option<&NetworkTarget>) {
        self.generator_sampler = Some(CpuTimeSampler::new(self.host, process));
        self.has_target = target_sampler.is_some();
        self.target_sampler = target_sampler
            .and_then(|target_sampler| target_sampler.process)
            .map(|process| CpuTimeSampler::new(self.host, process));
        if self.wants("counters") {
            self.process_counters = self
                .available("counting the generator", ProcessCounters::open(process, &EVENTS))
                .map(CounterInterval::of);
        }
    }

    /// Opens whatever takes time to open.
    pub(crate) fn open(&mut self) {
        if self.wants("counters") {
            self.system_counters = self
                .available("counting the machine", SystemCounters::open(self.cpus, &EVENTS))
                .map(CounterInterval::of);
        }
        if self.wants("profile") {
            let profile = CpuProfiler::start(self.cpus, SymbolClasses::built_in());
            self.profile = self.available("sampling", profile);
        }
        if self.wants("tokens") {
            self.tokens = self.available("Kyber's tokens", KyberTokenMeter::start(self.host));
        }
    }

    fn available<T>(&mut self, what: &str, result: std::io::Result<T>) -> Option<T> {
        result.map_err(|error| self.missing.push(format!("{what} is not possible here: {error}"))).ok()
    }

    fn samplers(&mut self) -> impl Iterator<Item = &mut CpuTimeSampler<'a>> {
        self.generator_sampler.iter_mut().chain(&mut self.target_sampler)
    }

    /// Starts the measurement: discards everything before.
    pub(crate) fn start_measuring(&mut self) {
        self.measuring = true;
        self.samplers().for_each(CpuTimeSampler::start_measuring);
        if let Some(process_counters) = &mut self.process_counters {
            process_counters.start_measuring(ProcessCounters::read);
        }
        if let Some(system_counters) = &mut self.system_counters {
            system_counters.start_measuring(SystemCounters::read);
        }
        if let Some(profile) = &mut self.profile {
            profile.reset();
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.reset();
        }
    }

    /// Samples processes and counters.
    pub(crate) fn sample(&mut self) {
        self.samplers().for_each(CpuTimeSampler::sample);
        if let Some(process_counters) = &mut self.process_counters {
            process_counters.sample(ProcessCounters::read);
        }
        if let Some(system_counters) = &mut self.system_counters {
            system_counters.sample(SystemCounters::read);
        }
        if let Some(profile) = &mut self.profile {
            profile.collect();
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.collect();
        }
    }

    /// Stores the results in the record. `bypassed` is set if I/O did not go through the kernel.
    pub(crate) fn finish(mut self, record: &mut CellRecord, bypassed: bool) {
        let Some(generator_sampler) = self.generator_sampler.take() else { return };
        let cpu = generator_sampler.cpu_use();
        let ios: f64 = ["fg", "bg"].iter().filter_map(|role| record.metric(role, "iops")).sum();
        record.submission_path = Some(if bypassed { "user-space" } else { cpu.path() }.to_string());
        let all = record.role_mut("all");
        all.set("cpu_cores", cpu.machine);
        all.set("generator_cores", cpu.own);
        all.set("kernel_thread_iou_sqp_cores", cpu.sqp);
        all.set("kernel_thread_iou_wrk_cores", cpu.wrk);
        all.set("kernel_thread_kworker_cores", cpu.kworker);
        all.set("kernel_thread_loop_cores", cpu.loops);
        all.set("kernel_thread_cores", cpu.sqp + cpu.wrk + cpu.kworker + cpu.loops);
        if ios > 0.0 {
            let cores = cpu.own + cpu.sqp + cpu.wrk + cpu.kworker + cpu.loops;
            all.set("cpu_ns_per_io", cores / ios * 1e9);
            record.role_mut("fg").set("cpu_ns_per_io", cores / ios * 1e9);
        }
        self.record_counters(record);
        if self.has_target {
            // A target in the kernel runs in kernel workers.
            let cores = self
                .target_sampler
                .as_ref()
                .map_or(cpu.kworker, |target_sampler| target_sampler.cpu_use().own);
            let all = record.role_mut("all");
            all.set("target_cores", cores);
            if ios > 0.0 {
                all.set("target_cpu_ns_per_io", cores / ios * 1e9);
            }
        }
        if !self.measuring {
            record.notes.push("the generator ended during the ramp: CPU time includes the ramp".into());
        }
    }

    /// Stores counters, profile and tokens in the record.
    fn record_counters(&mut self, record: &mut CellRecord) {
        let iops = |role: &str| record.metric(role, "iops").unwrap_or(0.0);
        let rate = iops("fg") + iops("bg");
        if let Some(process_counters) = self.process_counters.take() {
            process_counters.into_metrics(record.role_mut("fg"), rate);
        }
        if let Some(system_counters) = self.system_counters.take() {
            system_counters.into_metrics(record.role_mut("all"), rate);
        }
        if let Some(profile) = self.profile.take() {
            let classes = SymbolClasses::built_in();
            let shares = profile.stop();
            for class in classes.names() {
                let busy = class != "idle";
                for role in ["fg", "all"] {
                    record.role_mut(role).set(format!("share_{class}_pct"), shares.percent(class, busy));
                }
            }
            let all = record.role_mut("all");
            // As perf counts cycles: idle time is excluded.
            all.set("lock_share_pct", shares.percent("locks", true));
            all.set("samples", shares.total() as f64);
            record.notes.push(format!("profile by {}, {} samples", shares.sampled_by, shares.total()));
        }
        if let Some(tokens) = self.tokens.take() {
            let all = record.role_mut("all");
            let (read, write) = tokens.averages();
            all.set("read_tokens", read);
            all.set("write_tokens", write);
        }
        record.notes.append(&mut self.missing);
    }
}

/// The counters of the studies.
const EVENTS: [CounterEvent; 7] = CounterEvent::ALL;

/// Counters, with readings at the start of the measurement and at the last sample.
struct CounterInterval<T> {
    counters: T,
    first: Option<(Instant, CounterReading)>,
    last: Option<(Instant, CounterReading)>,
}

type CounterReading = Vec<(CounterEvent, CounterValue)>;

impl<T> CounterInterval<T> {
    fn of(counters: T) -> CounterInterval<T> {
        CounterInterval { counters, first: None, last: None }
    }

    fn start_measuring(&mut self, read: impl Fn(&T) -> std::io::Result<CounterReading>) {
        self.first = read(&self.counters).ok().map(|reading| (Instant::now(), reading));
        self.last = None;
    }

    fn sample(&mut self, read: impl Fn(&T) -> std::io::Result<CounterReading>) {
        if self.first.is_some()
            && let Ok(reading) = read(&self.counters)
        {
            self.last = Some((Instant::now(), reading));
        }
    }

    /// Stores the counters as metrics; `rate` is I/Os per second.
    fn into_metrics(self, role: &mut RoleRecord, rate: f64) {
        let (Some((began, first)), Some((ended, last))) = (self.first, self.last) else { return };
        let seconds = ended.duration_since(began).as_secs_f64();
        let count_of = |event: CounterEvent| {
            let value_in = |reading: &CounterReading| {
                reading.iter().find(|(known, _)| *known == event).map(|(_, count)| *count)
            };
            let count = value_in(&last)?.since(value_in(&first)?).scaled();
            (count > 0.0 && seconds > 0.0).then_some(count)
        };
        let ios = rate * seconds;
        if ios > 0.0 {
            for (event, name) in
                [(CounterEvent::Instructions, "instructions_per_io"), (CounterEvent::Cycles, "cycles_per_io")]
            {
                if let Some(count) = count_of(event) {
                    role.set(name, count / ios);
                }
            }
        }
        if let (Some(instructions), Some(cycles)) =
            (count_of(CounterEvent::Instructions), count_of(CounterEvent::Cycles))
        {
            role.set("ipc", instructions / cycles);
        }
        if let (Some(misses), Some(references)) =
            (count_of(CounterEvent::CacheMisses), count_of(CounterEvent::CacheReferences))
        {
            role.set("cache_miss_ratio", misses / references);
        }
        if let Some(ns) = count_of(CounterEvent::TaskClock) {
            role.set("task_clock_cores", ns / 1e9 / seconds);
        }
        if let Some(count) = count_of(CounterEvent::ContextSwitches) {
            role.set("context_switches_per_s", count / seconds);
        }
    }
}
