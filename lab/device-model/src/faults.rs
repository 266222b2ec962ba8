//! Rule-based fault injection: media errors, timeouts, latency spikes, controller failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Op, Status};
use serde::Deserialize;

use crate::profile::ProfileError;
use crate::profile::check::{check_range, invalid_value};
use crate::rng::ModelRng;

/// A fault injection rule: which fault affects which commands, and how often.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFault {
    /// The fault.
    pub kind: FaultKind,
    /// Affected operations.
    #[serde(default)]
    pub op: FaultOp,
    /// Probability of the fault for a matching command, 0 to 1.
    #[serde(default = "default_rate")]
    pub rate: f64,
    /// First affected logical block; 0 if absent.
    pub first_lba: Option<u64>,
    /// Last affected logical block, inclusive; the end of the device if absent.
    pub last_lba: Option<u64>,
    /// Microseconds added by a latency spike; only for that fault, at most 60 seconds.
    #[serde(default)]
    pub latency_us: f64,
    /// Maximum number of faults; unlimited if absent.
    pub count: Option<u64>,
}

/// Fault types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The command fails: Unrecovered Read Error for reads, Write Fault for other commands.
    MediaError,
    /// The command does not complete until the device is reset or removed.
    Timeout,
    /// The command takes longer by `latency_us`.
    LatencySpike,
    /// The command is executed and its completion is lost: a timeout, but the data is written.
    DroppedCompletion,
    /// The controller sets CSTS.CFS: nothing completes on any queue until the device is reset, which
    /// aborts all commands in flight.
    ControllerFatal,
    /// Surprise removal: all commands in flight and all later ones fail.
    SurpriseRemoval,
}

/// Operations that a rule matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultOp {
    /// All except reset.
    #[default]
    Any,
    /// Reads.
    Read,
    /// Write, Write Zeroes and Write Uncorrectable.
    Write,
    /// Flushes.
    Flush,
    /// Deallocations.
    Unmap,
}

/// Result of evaluating the rules for one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultOutcome {
    /// Success, delayed by this many nanoseconds.
    Delay(u64),
    /// Completion with an error status.
    Fail(Status),
    /// Never completes.
    Hang,
    /// Executed; the completion is dropped.
    DropCompletion,
    /// The controller sets CSTS.CFS.
    Fatal,
    /// The device is removed.
    SurpriseRemoval,
}

/// A set of rules. Clones share the remaining count of each rule.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelFaultRules(Vec<ActiveFault>);

#[derive(Clone, Debug)]
struct ActiveFault {
    fault: ModelFault,
    /// The rule fires if 64 random bits are below this; `None` for always.
    threshold: Option<u64>,
    remaining: Option<Arc<AtomicU64>>,
}

fn default_rate() -> f64 {
    1.0
}

impl ModelFault {
    /// A rule that affects every command except reset.
    pub fn new(kind: FaultKind) -> ModelFault {
        ModelFault {
            kind,
            op: FaultOp::Any,
            rate: 1.0,
            first_lba: None,
            last_lba: None,
            latency_us: 0.0,
            count: None,
        }
    }

    /// Validates the rule; the error names `key` and the field in it.
    pub fn check(&self, key: &str) -> Result<(), ProfileError> {
        check_range(&format!("{key}.rate"), self.rate, 0.0, 1.0)?;
        check_range(&format!("{key}.latency_us"), self.latency_us, 0.0, 60e6)?;
        if (self.kind == FaultKind::LatencySpike) != (self.latency_us > 0.0) {
            let reason = "required for latency_spike and not allowed for other kinds".to_string();
            return Err(invalid_value(&format!("{key}.latency_us"), reason));
        }
        if self.last_lba.is_some_and(|last| last < self.first_lba.unwrap_or(0)) {
            return Err(invalid_value(&format!("{key}.last_lba"), "is before first_lba".to_string()));
        }
        Ok(())
    }

    fn matches(&self, op: Op, lba: u64, blocks: u32) -> bool {
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

impl ModelFaultRules {
    pub(crate) fn new(faults: &[ModelFault]) -> ModelFaultRules {
        let rule = |fault: &ModelFault| ActiveFault {
            threshold: (fault.rate < 1.0).then_some((fault.rate * 2f64.powi(64)) as u64),
            remaining: fault.count.map(|count| Arc::new(AtomicU64::new(count))),
            fault: fault.clone(),
        };
        ModelFaultRules(faults.iter().map(rule).collect())
    }

    pub(crate) fn push(&mut self, fault: &ModelFault) {
        self.0.extend(ModelFaultRules::new(std::slice::from_ref(fault)).0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Evaluates the rules in order. The first fault other than a spike wins; spikes add up.
    pub(crate) fn evaluate(&self, op: Op, lba: u64, blocks: u32, random: &mut ModelRng) -> FaultOutcome {
        let mut late_ns = 0;
        for rule in &self.0 {
            let fires = rule.fault.matches(op, lba, blocks)
                && rule.threshold.is_none_or(|threshold| random.next_u64() < threshold)
                && rule.consume_count();
            if !fires {
                continue;
            }
            match rule.fault.kind {
                FaultKind::MediaError if op == Op::Read => {
                    return FaultOutcome::Fail(Status::UNRECOVERED_READ_ERROR);
                }
                FaultKind::MediaError => return FaultOutcome::Fail(Status::WRITE_FAULT),
                FaultKind::Timeout => return FaultOutcome::Hang,
                FaultKind::DroppedCompletion => return FaultOutcome::DropCompletion,
                FaultKind::ControllerFatal => return FaultOutcome::Fatal,
                FaultKind::SurpriseRemoval => return FaultOutcome::SurpriseRemoval,
                FaultKind::LatencySpike => late_ns += (rule.fault.latency_us * 1000.0) as u64,
            }
        }
        FaultOutcome::Delay(late_ns)
    }
}

impl ActiveFault {
    /// Consumes one of the remaining faults; `false` if none is left.
    fn consume_count(&self) -> bool {
        let Some(remaining) = &self.remaining else { return true };
        let decrement = |remaining: u64| remaining.checked_sub(1);
        remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluate(fault: ModelFault, op: Op, lba: u64) -> FaultOutcome {
        ModelFaultRules::new(&[fault]).evaluate(op, lba, 8, &mut ModelRng::new(1))
    }

    #[test]
    fn rules_match_their_operation_and_lba_range() {
        let fault = ModelFault {
            first_lba: Some(100),
            last_lba: Some(199),
            ..ModelFault::new(FaultKind::MediaError)
        };
        for (op, lba, expected) in [
            (Op::Read, 92, FaultOutcome::Delay(0)),
            (Op::Read, 93, FaultOutcome::Fail(Status::UNRECOVERED_READ_ERROR)),
            (Op::Write, 199, FaultOutcome::Fail(Status::WRITE_FAULT)),
            (Op::Read, 200, FaultOutcome::Delay(0)),
            (Op::Flush, 150, FaultOutcome::Delay(0)),
            (Op::Reset, 150, FaultOutcome::Delay(0)),
        ] {
            assert_eq!(evaluate(fault.clone(), op, lba), expected, "{op:?} {lba}");
        }
        let reads = ModelFault { op: FaultOp::Read, ..ModelFault::new(FaultKind::Timeout) };
        assert_eq!(evaluate(reads.clone(), Op::Read, 0), FaultOutcome::Hang);
        assert_eq!(evaluate(reads, Op::Write, 0), FaultOutcome::Delay(0));
    }

    #[test]
    fn rules_respect_rate_and_count() {
        let mut random = ModelRng::new(3);
        let rules =
            ModelFaultRules::new(&[ModelFault { rate: 0.01, ..ModelFault::new(FaultKind::MediaError) }]);
        let hits =
            (0..100_000).filter(|_| rules.evaluate(Op::Read, 0, 1, &mut random) != FaultOutcome::Delay(0));
        let hits = hits.count();
        assert!((850..1150).contains(&hits), "{hits}");
        let rules =
            ModelFaultRules::new(&[ModelFault { count: Some(3), ..ModelFault::new(FaultKind::Timeout) }]);
        let twin = rules.clone();
        let hits = (0..10).filter(|index| {
            let rules = if index % 2 == 0 { &rules } else { &twin };
            rules.evaluate(Op::Read, 0, 1, &mut random) == FaultOutcome::Hang
        });
        assert_eq!(hits.count(), 3);
    }

    #[test]
    fn an_invalid_rule_error_names_the_key() {
        let spike = ModelFault::new(FaultKind::LatencySpike);
        assert!(spike.check("faults[0]").unwrap_err().to_string().starts_with("faults[0].latency_us:"));
        let nowhere =
            ModelFault { first_lba: Some(9), last_lba: Some(8), ..ModelFault::new(FaultKind::MediaError) };
        assert!(nowhere.check("faults[1]").unwrap_err().to_string().starts_with("faults[1].last_lba:"));
        let often = ModelFault { rate: f64::NAN, ..ModelFault::new(FaultKind::MediaError) };
        assert!(often.check("x").unwrap_err().to_string().starts_with("x.rate:"));
    }
}
