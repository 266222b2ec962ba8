use lab_experiments::{CellRecord, PlannedDevice};

use super::*;

/// One experiment that varies scheduler, depth and repetition; `value` returns P99 in microseconds.
fn run(repetitions: u32, value: impl Fn(&str, i64, u32) -> f64) -> RunDirectory {
    let mut run = RunDirectory::default();
    run.plan.targets =
        vec![PlannedDevice { kind: "block".into(), path: "/dev/nvme0n1".into(), ..PlannedDevice::default() }];
    for scheduler in ["none", "kyber", "bfq"] {
        for depth in [1, 16] {
            for repetition in 0..repetitions {
                let mut record = CellRecord::new("t.fig", scheduler);
                record.parameters.insert("api".into(), "iou".into());
                record.parameters.insert("scheduler".into(), scheduler.into());
                record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
                record.repetition = repetition;
                record.generator.cost_ns_per_io = Some(500.0);
                record.role_mut("fg").set("clat_p99_us", value(scheduler, depth, repetition));
                run.records.push(record);
            }
        }
    }
    run
}

fn factor(scheduler: &str) -> f64 {
    match scheduler {
        "none" => 1.0,
        "kyber" => 1.2,
        _ => 1.6,
    }
}

#[test]
fn a_significant_lead_wins() {
    let run = run(3, |scheduler, depth, repetition| {
        100.0 * depth as f64 * factor(scheduler) * (1.0 + 0.01 * f64::from(repetition))
    });
    let advice = advise(&run, AdviceGoal::P99);
    assert_eq!(advice.scheduler.choice, Choice::Wins("none".into()));
    assert!(
        advice.scheduler.because.contains("kyber is 20 % above it over 2 matched configurations (95 %: +"),
        "{}",
        advice.scheduler.because
    );
    assert_eq!(advice.commands[0], "echo none > /sys/block/nvme0n1/queue/scheduler");
    assert_eq!(advice.api.choice, Choice::Untested);
    assert_eq!(advice.headline(), "none, any API");
}

#[test]
fn an_insignificant_difference_is_a_tie() {
    let noise = [0.5, 1.7, 1.1];
    let run = run(3, |scheduler, depth, repetition| {
        100.0 * depth as f64 * factor(scheduler).sqrt() * noise[repetition as usize]
    });
    let advice = advise(&run, AdviceGoal::P99);
    assert_eq!(advice.scheduler.choice, Choice::Tied(vec!["none".into(), "kyber".into(), "bfq".into()]));
    assert!(advice.commands.is_empty());
    assert_eq!(advice.headline(), "no recommendation");
}

#[test]
fn a_difference_below_the_generators_cost_is_a_tie() {
    // A repeatable difference of 0.2 us, with a generator cost of 0.5 us per I/O.
    let tail = |scheduler: &str, depth: i64, repetition: u32| {
        let extra = if scheduler == "none" { 0.0 } else { 0.2 };
        10.0 * depth as f64 + extra + 0.001 * f64::from(repetition)
    };
    let advice = advise(&run(3, tail), AdviceGoal::P99);
    assert!(matches!(&advice.scheduler.choice, Choice::Tied(names) if names.len() == 3));
    assert!(advice.scheduler.because.contains("generator's own cost"), "{}", advice.scheduler.because);
}

#[test]
fn a_single_repetition_leads_without_winning() {
    let advice =
        advise(&run(1, |scheduler, depth, _| 100.0 * depth as f64 * factor(scheduler)), AdviceGoal::P99);
    assert_eq!(advice.scheduler.choice, Choice::Leads("none".into()));
    assert!(advice.scheduler.because.contains("measured once"), "{}", advice.scheduler.because);
}

#[test]
fn a_goal_without_applicable_cells_is_untested() {
    let advice = advise(&run(3, |_, _, _| 100.0), AdviceGoal::Isolation);
    assert_eq!(advice.scheduler.choice, Choice::Untested);
    assert_eq!(advise(&RunDirectory::default(), AdviceGoal::P99).headline(), "no recommendation");
}
