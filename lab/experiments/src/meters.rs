//! What is measured beside the generator's own results.

use crate::host::Host;
use crate::record::CellRecord;
use crate::session::NetworkTarget;
use crate::watch::Watch;

/// The meters of one cell.
pub(crate) struct Meters<'a> {
    host: &'a Host,
    watch: Option<Watch<'a>>,
    /// The target's process, where the generator drives one that has a process.
    target: Option<Watch<'a>>,
    has_target: bool,
    measuring: bool,
}

impl<'a> Meters<'a> {
    /// Meters for what a definition wants measured.
    pub(crate) fn new(host: &'a Host, _wanted: &[String], _devices: &[String]) -> Meters<'a> {
        Meters { host, watch: None, target: None, has_target: false, measuring: false }
    }

    /// The generator is there.
    pub(crate) fn start(&mut self, process: u32, target: Option<&NetworkTarget>) {
        self.watch = Some(Watch::new(self.host, process));
        self.has_target = target.is_some();
        self.target = target.and_then(|target| target.process).map(|process| Watch::new(self.host, process));
    }

    fn watches(&mut self) -> impl Iterator<Item = &mut Watch<'a>> {
        self.watch.iter_mut().chain(&mut self.target)
    }

    /// What was before does not count.
    pub(crate) fn begin(&mut self) {
        self.measuring = true;
        self.watches().for_each(Watch::begin);
    }

    /// Looks at those that may be gone at the next look.
    pub(crate) fn look(&mut self) {
        self.watches().for_each(Watch::look);
    }

    /// The generator ended: what it was, into the record. `own` says that the kernel was not asked.
    pub(crate) fn finish(&mut self, record: &mut CellRecord, own: bool) {
        let Some(watch) = &self.watch else { return };
        let spent = watch.spent();
        let ios: f64 = ["fg", "bg"].iter().filter_map(|role| record.metric(role, "iops")).sum();
        record.submission_path = Some(if own { "user-space" } else { spent.path() }.to_string());
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
}
