//! I/O priorities of single I/Os.

use super::*;
use crate::priorities::{CommandPriorities, PriorityShare};

#[test]
fn a_share_of_the_ios_has_a_priority_of_its_own() {
    let share = PriorityShare { block_bytes: None, percent: 25, priority: 8192 };
    let command_priorities = CommandPriorities { shares: [vec![share], vec![]], of_total_latency: false };
    let job =
        JobSpec { priority: 24_576, command_priorities, number_ios: Some(8000), ..spec(Workload::RandRw) };
    let mut device = FakeDevice::new(64, 64);
    let mut generator = start(job, 64);
    let by_tag = generator.priorities().unwrap();
    let mut seen = [0, 0];
    while !generator.is_finished() {
        generator.turn(&mut device);
        for request in &device.queue {
            seen[usize::from(by_tag.get(request.tag.0) == 8192)] += 1;
            assert!(request.op == Op::Read || by_tag.get(request.tag.0) == 0, "writes have that of the job");
        }
    }
    let result = generator.into_result();
    let reads = &result.directions[0];
    let count = |priority: u16| {
        let found = reads.priorities.iter().find(|(known, _)| *known == priority);
        found.map_or(0, |(_, latencies)| latencies.count())
    };
    assert_eq!((count(8192) + count(24_576), reads.priorities.len()), (reads.total_ios, 2));
    let percent = 100.0 * count(8192) as f64 / reads.total_ios as f64;
    assert!((20.0..30.0).contains(&percent) && seen[1] > 0, "{percent} %, {seen:?}");
    assert!(result.directions[1].priorities.is_empty());
    // Jobs of a group with other priorities have the entries of theirs.
    let alone = JobSpec { priority: 16_384, number_ios: Some(10), ..spec(Workload::RandRead) };
    let other = run(alone, &mut device);
    let merged = JobResult::merged(&[result, other]).unwrap();
    let priorities: Vec<u16> = merged.directions[0].priorities.iter().map(|(one, _)| *one).collect();
    assert_eq!((priorities.len(), priorities.contains(&16_384)), (3, true), "{priorities:?}");
}
