//! What goes wrong, by rule: media errors, commands that never end or take long, controllers that stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::{Op, Status};
use serde::Deserialize;

use crate::profile::ProfileError;
use crate::profile::check::{number, wrong};
use crate::random::Random;

/// A rule: what happens to which commands, how often.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What happens.
    pub kind: FaultKind,
    /// To which operations.
    #[serde(default)]
    pub op: FaultOp,
    /// Probability that it happens to a command to which the rule applies.
    #[serde(default = "always")]
    pub rate: f64,
    /// Only commands that touch blocks from here,
    pub first_lba: Option<u64>,
    /// to here, this one included.
    pub last_lba: Option<u64>,
    /// Microseconds that a latency spike adds.
    #[serde(default)]
    pub latency_us: f64,
    /// How many times it happens; without, for ever.
    pub count: Option<u64>,
}

/// What happens to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// It fails: an unrecovered read error for reads, a write fault for anything else.
    MediaError,
    /// It never completes, until the device is reset or goes away.
    Timeout,
    /// It takes longer.
    LatencySpike,
    /// It is carried out and its completion is lost: as a timeout, but data was written.
    DroppedCompletion,
    /// It makes the controller report a fatal status: nothing completes any more, on any queue, until the
    /// device is reset, which aborts what is in flight.
    ControllerFatal,
    /// It finds the device pulled out: what is in flight fails, and everything from then on.
    SurpriseRemoval,
}

/// Operations that a rule is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultOp {
    /// All but reset.
    #[default]
    Any,
    /// Reads.
    Read,
    /// Writes and writes of zeroes.
    Write,
    /// Flushes.
    Flush,
    /// Deallocations.
    Unmap,
}

/// What the rules make of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It succeeds, so many nanoseconds late.
    Late(u64),
    Fails(Status),
    Never,
    /// Carried out, and never ended.
    Lost,
    /// The controller stops.
    Fatal,
    /// The device is gone.
    Gone,
}

/// Rules that channels share; how often each may still happen is counted together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules(Vec<Rule>);

#[derive(Clone, Debug)]
struct Rule {
    fault: Fault,
    /// It happens where 64 random bits are below this; `None` for always.
    threshold: Option<u64>,
    left: Arc<AtomicU64>,
}

fn always() -> f64 {
    1.0
}

impl Fault {
    /// A rule that applies to every command, always.
    pub fn new(kind: FaultKind) -> Fault {
        Fault {
            kind,
            op: FaultOp::Any,
            rate: 1.0,
            first_lba: None,
            last_lba: None,
            latency_us: 0.0,
            count: None,
        }
    }

    /// Refuses values that cannot be; the error names `key` and what is in it.
    pub fn check(&self, key: &str) -> Result<(), ProfileError> {
        number(&format!("{key}.rate"), self.rate, 0.0, 1.0)?;
        number(&format!("{key}.latency_us"), self.latency_us, 0.0, 60e6)?;
        if (self.kind == FaultKind::LatencySpike) != (self.latency_us > 0.0) {
            let reason = "it is for latency_spike, which needs it".to_string();
            return Err(wrong(&format!("{key}.latency_us"), reason));
        }
        if self.last_lba.is_some_and(|last| last < self.first_lba.unwrap_or(0)) {
            return Err(wrong(&format!("{key}.last_lba"), "it is before first_lba".to_string()));
        }
        Ok(())
    }

    fn applies(&self, op: Op, lba: u64, blocks: u32) -> bool {
        let op_fits = match self.op {
            FaultOp::Any => op != Op::Reset,
            FaultOp::Read => op == Op::Read,
            FaultOp::Write => matches!(op, Op::Write | Op::WriteZeroes | Op::WriteUncorrectable),
            FaultOp::Flush => op == Op::Flush,
            FaultOp::Unmap => op == Op::Unmap,
        };
        let anywhere = self.first_lba.is_none() && self.last_lba.is_none();
        let end = lba.saturating_add(u64::from(blocks));
        let inside = end > self.first_lba.unwrap_or(0) && lba <= self.last_lba.unwrap_or(u64::MAX);
        op_fits && (anywhere || (op.has_range() && inside))
    }
}

impl Rules {
    pub(crate) fn new(faults: &[Fault]) -> Rules {
        let rule = |fault: &Fault| Rule {
            threshold: (fault.rate < 1.0).then_some((fault.rate * 2f64.powi(64)) as u64),
            left: Arc::new(AtomicU64::new(fault.count.unwrap_or(u64::MAX))),
            fault: fault.clone(),
        };
        Rules(faults.iter().map(rule).collect())
    }

    pub(crate) fn push(&mut self, fault: &Fault) {
        self.0.extend(Rules::new(std::slice::from_ref(fault)).0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// What happens to a command. The first error decides; spikes add up.
    pub(crate) fn judge(&self, op: Op, lba: u64, blocks: u32, random: &mut Random) -> Verdict {
        let mut late_ns = 0;
        for rule in &self.0 {
            let hit = rule.fault.applies(op, lba, blocks)
                && rule.threshold.is_none_or(|threshold| random.bits() < threshold)
                && rule.take();
            if !hit {
                continue;
            }
            match rule.fault.kind {
                FaultKind::MediaError if op == Op::Read => {
                    return Verdict::Fails(Status::UNRECOVERED_READ_ERROR);
                }
                FaultKind::MediaError => return Verdict::Fails(Status::WRITE_FAULT),
                FaultKind::Timeout => return Verdict::Never,
                FaultKind::DroppedCompletion => return Verdict::Lost,
                FaultKind::ControllerFatal => return Verdict::Fatal,
                FaultKind::SurpriseRemoval => return Verdict::Gone,
                FaultKind::LatencySpike => late_ns += (rule.fault.latency_us * 1000.0) as u64,
            }
        }
        Verdict::Late(late_ns)
    }
}

impl Rule {
    /// Uses one of the times that it may happen.
    fn take(&self) -> bool {
        if self.fault.count.is_none() {
            return true;
        }
        let less = |left: u64| left.checked_sub(1);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(fault: Fault, op: Op, lba: u64) -> Verdict {
        Rules::new(&[fault]).judge(op, lba, 8, &mut Random::new(1))
    }

    #[test]
    fn rules_apply_to_their_operation_and_range() {
        let fault = Fault { first_lba: Some(100), last_lba: Some(199), ..Fault::new(FaultKind::MediaError) };
        for (op, lba, expected) in [
            (Op::Read, 92, Verdict::Late(0)),
            (Op::Read, 93, Verdict::Fails(Status::UNRECOVERED_READ_ERROR)),
            (Op::Write, 199, Verdict::Fails(Status::WRITE_FAULT)),
            (Op::Read, 200, Verdict::Late(0)),
            (Op::Flush, 150, Verdict::Late(0)),
            (Op::Reset, 150, Verdict::Late(0)),
        ] {
            assert_eq!(judge(fault.clone(), op, lba), expected, "{op:?} {lba}");
        }
        let reads = Fault { op: FaultOp::Read, ..Fault::new(FaultKind::Timeout) };
        assert_eq!(judge(reads.clone(), Op::Read, 0), Verdict::Never);
        assert_eq!(judge(reads, Op::Write, 0), Verdict::Late(0));
    }

    #[test]
    fn rates_and_counts_hold() {
        let mut random = Random::new(3);
        let rules = Rules::new(&[Fault { rate: 0.01, ..Fault::new(FaultKind::MediaError) }]);
        let hits = (0..100_000).filter(|_| rules.judge(Op::Read, 0, 1, &mut random) != Verdict::Late(0));
        let hits = hits.count();
        assert!((850..1150).contains(&hits), "{hits}");
        let rules = Rules::new(&[Fault { count: Some(3), ..Fault::new(FaultKind::Timeout) }]);
        let twin = rules.clone();
        let hits = (0..10).filter(|index| {
            let rules = if index % 2 == 0 { &rules } else { &twin };
            rules.judge(Op::Read, 0, 1, &mut random) == Verdict::Never
        });
        assert_eq!(hits.count(), 3);
    }

    #[test]
    fn a_rule_that_cannot_be_names_its_key() {
        let spike = Fault::new(FaultKind::LatencySpike);
        assert!(spike.check("faults[0]").unwrap_err().to_string().starts_with("faults[0].latency_us:"));
        let nowhere = Fault { first_lba: Some(9), last_lba: Some(8), ..Fault::new(FaultKind::MediaError) };
        assert!(nowhere.check("faults[1]").unwrap_err().to_string().starts_with("faults[1].last_lba:"));
        let often = Fault { rate: f64::NAN, ..Fault::new(FaultKind::MediaError) };
        assert!(often.check("x").unwrap_err().to_string().starts_with("x.rate:"));
    }
}
