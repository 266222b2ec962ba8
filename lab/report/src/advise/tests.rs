use lab_experiments::{CellRecord, PlannedDevice};

use super::*;

fn advise(run: &RunDirectory, goal: AdviceGoal) -> Advice {
    super::advise(run, goal, &|_| true)
}

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
fn there_is_no_advice_from_one_measurement() {
    let advice =
        advise(&run(1, |scheduler, depth, _| 100.0 * depth as f64 * factor(scheduler)), AdviceGoal::P99);
    assert_eq!(advice.scheduler.choice, Choice::Untested);
    assert!(advice.scheduler.because.contains("measured once"), "{}", advice.scheduler.because);
    assert!(advice.commands.is_empty());
}

/// A run in which none wins clearly.
fn clear_run() -> RunDirectory {
    run(3, |scheduler, depth, repetition| {
        100.0 * depth as f64 * factor(scheduler) * (1.0 + 0.01 * f64::from(repetition))
    })
}

#[test]
fn there_is_no_advice_from_a_loop_device_or_a_model() {
    for (kind, path, word) in [
        ("loop", "/dev/loop0", "page cache"),
        ("uri", "model:optane", "a model"),
        ("uri", "null:1g", "emulated"),
    ] {
        let mut run = clear_run();
        run.plan.targets[0].kind = kind.into();
        run.plan.targets[0].path = path.into();
        let advice = advise(&run, AdviceGoal::P99);
        assert_eq!((&advice.scheduler.choice, advice.commands.len()), (&Choice::Untested, 0), "{path}");
        assert!(advice.scheduler.because.contains(word), "{}", advice.scheduler.because);
        assert_eq!(advice.headline(), "no recommendation");
    }
}

#[test]
fn commands_are_for_the_measured_device_if_it_is_there() {
    let mut run = clear_run();
    run.machine.facts = serde_json::json!({ "devices": [{ "name": "nvme0n1", "model": "Example SSD" }] });
    let here = advise(&run, AdviceGoal::P99);
    assert!(
        here.commands[1]
            .contains("KERNEL==\"nvme0n1\", ATTRS{model}==\"Example SSD\", ATTR{queue/scheduler}=\"none\""),
        "{:?}",
        here.commands
    );
    let gone = super::advise(&run, AdviceGoal::P99, &|_| false);
    assert_eq!(gone.scheduler.choice, Choice::Wins("none".into()));
    assert!(gone.commands.is_empty(), "{:?}", gone.commands);
    assert!(gone.caveats.iter().any(|caveat| caveat.contains("/dev/nvme0n1: not on this machine")));
}

#[test]
fn stand_ins_are_no_evidence() {
    let mut run = clear_run();
    for record in run.records.iter_mut().filter(|record| record.series == "none") {
        record.stand_in = Some("it shares its core".into());
    }
    let advice = advise(&run, AdviceGoal::P99);
    assert_eq!(advice.scheduler.choice, Choice::Wins("kyber".into()));
    assert!(advice.scheduler.options.iter().all(|option| option.name != "none"));
}

#[test]
fn a_goal_without_applicable_cells_is_untested() {
    let advice = advise(&run(3, |_, _, _| 100.0), AdviceGoal::Isolation);
    assert_eq!(advice.scheduler.choice, Choice::Untested);
    assert_eq!(advise(&RunDirectory::default(), AdviceGoal::P99).headline(), "no recommendation");
}
