//! What is measured beside the generator's own results.

use std::time::Instant;

use perf_counters::{
    CounterEvent, CounterValue, CpuProfiler, ProcessCounters, SymbolClasses, SystemCounters,
};

use crate::host::Host;
use crate::record::{CellRecord, RoleRecord};
use crate::session::NetworkTarget;
use crate::tokens::Tokens;
use crate::watch::Watch;

/// The meters of one cell.
pub(crate) struct Meters<'a> {
    host: &'a Host,
    cpus: &'a [u32],
    wants: &'a [String],
    tree: Option<Counted<ProcessCounters>>,
    system: Option<Counted<SystemCounters>>,
    profile: Option<CpuProfiler>,
    tokens: Option<Tokens>,
    /// What was wanted and cannot be had.
    missing: Vec<String>,
    watch: Option<Watch<'a>>,
    /// The target's process, where the generator drives one that has a process.
    target: Option<Watch<'a>>,
    has_target: bool,
    measuring: bool,
}

impl<'a> Meters<'a> {
    /// Meters for what a definition wants measured, on the processors that a cell may use.
    pub(crate) fn new(host: &'a Host, wants: &'a [String], cpus: &'a [u32]) -> Meters<'a> {
        Meters {
            host,
            cpus,
            wants,
            tree: None,
            system: None,
            profile: None,
            tokens: None,
            missing: Vec::new(),
            watch: None,
            target: None,
            has_target: false,
            measuring: false,
        }
    }

    fn wants(&self, what: &str) -> bool {
        self.wants.iter().any(|name| name == what)
    }

    /// The generator is there.
    pub(crate) fn start(&mut self, process: u32, target: Option<&NetworkTarget>) {
        self.watch = Some(Watch::new(self.host, process));
        self.has_target = target.is_some();
        self.target = target.and_then(|target| target.process).map(|process| Watch::new(self.host, process));
        if self.wants("counters") {
            self.tree =
                self.had("counting the generator", ProcessCounters::open(process, &EVENTS)).map(Counted::of);
        }
    }

    /// Opens what takes time to open, before the generator begins.
    pub(crate) fn open(&mut self) {
        if self.wants("counters") {
            self.system =
                self.had("counting the machine", SystemCounters::open(self.cpus, &EVENTS)).map(Counted::of);
        }
        if self.wants("profile") {
            let profile = CpuProfiler::start(self.cpus, SymbolClasses::built_in());
            self.profile = self.had("sampling", profile);
        }
        if self.wants("tokens") {
            self.tokens = self.had("Kyber's tokens", Tokens::begin(self.host));
        }
    }

    fn had<T>(&mut self, what: &str, result: std::io::Result<T>) -> Option<T> {
        result.map_err(|error| self.missing.push(format!("{what} is not possible here: {error}"))).ok()
    }

    fn watches(&mut self) -> impl Iterator<Item = &mut Watch<'a>> {
        self.watch.iter_mut().chain(&mut self.target)
    }

    /// What was before does not count.
    pub(crate) fn begin(&mut self) {
        self.measuring = true;
        self.watches().for_each(Watch::begin);
        if let Some(tree) = &mut self.tree {
            tree.begin(ProcessCounters::read);
        }
        if let Some(system) = &mut self.system {
            system.begin(SystemCounters::read);
        }
        if let Some(profile) = &mut self.profile {
            profile.reset();
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.restart();
        }
    }

    /// Looks at those that may be gone at the next look.
    pub(crate) fn look(&mut self) {
        self.watches().for_each(Watch::look);
        if let Some(tree) = &mut self.tree {
            tree.look(ProcessCounters::read);
        }
        if let Some(system) = &mut self.system {
            system.look(SystemCounters::read);
        }
        if let Some(profile) = &mut self.profile {
            profile.collect();
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.collect();
        }
    }

    /// The generator ended: what it was, into the record. `bypassed` says that the kernel was not asked.
    pub(crate) fn finish(mut self, record: &mut CellRecord, bypassed: bool) {
        let Some(watch) = self.watch.take() else { return };
        let spent = watch.spent();
        let ios: f64 = ["fg", "bg"].iter().filter_map(|role| record.metric(role, "iops")).sum();
        record.submission_path = Some(if bypassed { "user-space" } else { spent.path() }.to_string());
        let all = record.role_mut("all");
        all.set("cpu_cores", spent.machine);
        all.set("generator_cores", spent.own);
        all.set("kernel_thread_iou_sqp_cores", spent.sqp);
        all.set("kernel_thread_iou_wrk_cores", spent.wrk);
        all.set("kernel_thread_kworker_cores", spent.kworker);
        all.set("kernel_thread_loop_cores", spent.loops);
        all.set("kernel_thread_cores", spent.sqp + spent.wrk + spent.kworker + spent.loops);
        if ios > 0.0 {
            let cpu = spent.own + spent.sqp + spent.wrk + spent.kworker + spent.loops;
            all.set("cpu_ns_per_io", cpu / ios * 1e9);
            record.role_mut("fg").set("cpu_ns_per_io", cpu / ios * 1e9);
        }
        self.counted(record);
        if self.has_target {
            // A kernel target works in the kernel's workers.
            let cores = self.target.as_ref().map_or(spent.kworker, |target| target.spent().own);
            let all = record.role_mut("all");
            all.set("target_cores", cores);
            if ios > 0.0 {
                all.set("target_cpu_ns_per_io", cores / ios * 1e9);
            }
        }
        if !self.measuring {
            record.notes.push("it ended before its ramp did: processor time is of all of it".into());
        }
    }

    /// Counters, samples and tokens, into the record.
    fn counted(&mut self, record: &mut CellRecord) {
        let iops = |role: &str| record.metric(role, "iops").unwrap_or(0.0);
        let rate = iops("fg") + iops("bg");
        if let Some(tree) = self.tree.take() {
            tree.into_metrics(record.role_mut("fg"), rate);
        }
        if let Some(system) = self.system.take() {
            system.into_metrics(record.role_mut("all"), rate);
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
            // As perf counts cycles: an idle processor has none, and time that is idle is left out.
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

/// What the studies count.
const EVENTS: [CounterEvent; 7] = CounterEvent::ALL;

/// Counters with their readings when measuring began and at the last look.
struct Counted<T> {
    counters: T,
    first: Option<(Instant, Reading)>,
    last: Option<(Instant, Reading)>,
}

type Reading = Vec<(CounterEvent, CounterValue)>;

impl<T> Counted<T> {
    fn of(counters: T) -> Counted<T> {
        Counted { counters, first: None, last: None }
    }

    fn begin(&mut self, read: impl Fn(&T) -> std::io::Result<Reading>) {
        self.first = read(&self.counters).ok().map(|reading| (Instant::now(), reading));
        self.last = None;
    }

    fn look(&mut self, read: impl Fn(&T) -> std::io::Result<Reading>) {
        if self.first.is_some()
            && let Ok(reading) = read(&self.counters)
        {
            self.last = Some((Instant::now(), reading));
        }
    }

    /// `rate` is of I/Os a second.
    fn into_metrics(self, role: &mut RoleRecord, rate: f64) {
        let (Some((began, first)), Some((ended, last))) = (self.first, self.last) else { return };
        let seconds = ended.duration_since(began).as_secs_f64();
        let of = |event: CounterEvent| {
            let at = |reading: &Reading| {
                reading.iter().find(|(known, _)| *known == event).map(|(_, count)| *count)
            };
            let count = at(&last)?.since(at(&first)?).scaled();
            (count > 0.0 && seconds > 0.0).then_some(count)
        };
        let ios = rate * seconds;
        if ios > 0.0 {
            for (event, name) in
                [(CounterEvent::Instructions, "instructions_per_io"), (CounterEvent::Cycles, "cycles_per_io")]
            {
                if let Some(count) = of(event) {
                    role.set(name, count / ios);
                }
            }
        }
        if let (Some(instructions), Some(cycles)) = (of(CounterEvent::Instructions), of(CounterEvent::Cycles))
        {
            role.set("ipc", instructions / cycles);
        }
        if let (Some(misses), Some(references)) =
            (of(CounterEvent::CacheMisses), of(CounterEvent::CacheReferences))
        {
            role.set("cache_miss_ratio", misses / references);
        }
        if let Some(ns) = of(CounterEvent::TaskClock) {
            role.set("task_clock_cores", ns / 1e9 / seconds);
        }
        if let Some(count) = of(CounterEvent::ContextSwitches) {
            role.set("context_switches_per_s", count / seconds);
        }
    }
}
