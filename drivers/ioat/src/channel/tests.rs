use ioat_model::IoatFault;
use proptest::prelude::*;

use super::model::{DATA_BYTES, MEMORY_AT, Model, RING_AT};
use super::*;

type Channel = IoatChannel<Model, u64>;

/// Polls a channel whose engine takes steps, until it is ready or has failed.
fn settle(channel: &mut Channel, now_ns: &mut u64) -> Vec<IoatCompletion<u64>> {
    let mut sink = Vec::new();
    for _ in 0..10_000 {
        if channel.is_ready() || channel.failure().is_some() {
            break;
        }
        channel.device_mut().step(8);
        channel.poll(*now_ns, &mut sink);
        *now_ns += RECHECK_NS;
    }
    sink
}

fn started(model: Model) -> (Channel, u64) {
    let mut now_ns = 0;
    let mut channel = IoatChannel::start(model, now_ns).unwrap();
    assert!(settle(&mut channel, &mut now_ns).is_empty());
    assert!(channel.is_ready(), "{:?}", channel.failure());
    (channel, now_ns)
}

fn copy(owned: u64, from: u64, to: u64, bytes: u64) -> IoatRequest<u64> {
    IoatRequest { op: IoatOp::Copy { from: MEMORY_AT + from, to: MEMORY_AT + to, bytes }, owned }
}

fn results(sink: &[IoatCompletion<u64>]) -> Vec<(u64, Result<(), IoatError>)> {
    sink.iter().map(|one| (one.owned, one.result)).collect()
}

#[test]
fn copies_longer_than_the_engine_takes_are_divided_and_fills_repeat_their_pattern() {
    let (mut channel, now_ns) = started(Model::new(16));
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at * 7) as u8).collect();
    channel.device_mut().memory[..10_000].copy_from_slice(&bytes);
    let fill = IoatOp::Fill { pattern: 0x0807_0605_0403_0201, to: MEMORY_AT + 40_000, bytes: 4100 };
    channel.submit(&mut vec![copy(1, 0, 20_000, 10_000), IoatRequest { op: fill, owned: 2 }]);
    let mut sink = Vec::new();
    assert_eq!((channel.poll(now_ns, &mut sink), channel.in_flight()), (0, 2));
    // Three descriptors of the copy, two of the fill.
    channel.device_mut().step(2);
    assert_eq!(channel.poll(now_ns, &mut sink), 0, "a part says nothing");
    channel.device_mut().step(1);
    assert_eq!(channel.poll(now_ns, &mut sink), 1);
    channel.device_mut().step(2);
    channel.poll(now_ns, &mut sink);
    assert_eq!(results(&sink), [(1, Ok(())), (2, Ok(()))]);
    let memory = &channel.device_mut().memory;
    assert_eq!(memory[20_000..30_000], bytes);
    let filled = &memory[40_000..44_100];
    assert!(filled.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at % 8 + 1));
    assert_eq!(memory[44_100], 0);
    assert_eq!(channel.deadline(now_ns), None);
}

#[test]
fn what_does_not_fit_the_ring_stays_in_the_batch() {
    let (mut channel, now_ns) = started(Model::new(4));
    let mut batch: Vec<_> = (0..10).map(|owned| copy(owned, 0, 4096, 8)).collect();
    let mut sink = Vec::new();
    channel.submit(&mut batch);
    assert_eq!((batch.len(), channel.in_flight()), (7, 3));
    for _ in 0..10 {
        channel.device_mut().step(1);
        channel.poll(now_ns, &mut sink);
        channel.submit(&mut batch);
    }
    assert_eq!(results(&sink), (0..10).map(|owned| (owned, Ok(()))).collect::<Vec<_>>());
}

#[test]
fn invalid_requests_are_errors_and_others_go_on() {
    let mut model = Model::new(8);
    model.engine.capabilities = 0;
    let (mut channel, now_ns) = started(model);
    let fill = IoatOp::Fill { pattern: 0, to: MEMORY_AT, bytes: 8 };
    let overflow = IoatOp::Copy { from: u64::MAX - 7, to: MEMORY_AT, bytes: 8 };
    channel.submit(&mut vec![
        copy(1, 0, 64, 0),
        IoatRequest { op: fill, owned: 2 },
        copy(3, 0, 64, 8),
        copy(4, 0, 64, 8 << 12),
        IoatRequest { op: overflow, owned: 5 },
    ]);
    let mut sink = Vec::new();
    channel.device_mut().step(8);
    channel.poll(now_ns, &mut sink);
    assert_eq!(
        results(&sink),
        [
            (1, Err(IoatError::Length { bytes: 0 })),
            (2, Err(IoatError::Unsupported)),
            (4, Err(IoatError::Length { bytes: 8 << 12 })),
            (5, Err(IoatError::Length { bytes: 8 })),
            (3, Ok(())),
        ]
    );
}

#[test]
fn an_error_fails_its_request_and_those_behind_it_after_a_reset() {
    let (mut channel, mut now_ns) = started(Model::new(16));
    let bad = IoatOp::Copy { from: 0x40, to: MEMORY_AT, bytes: 8 };
    channel.submit(&mut vec![copy(1, 0, 64, 8), IoatRequest { op: bad, owned: 2 }, copy(3, 0, 64, 8)]);
    channel.device_mut().step(8);
    let mut sink = Vec::new();
    assert_eq!(channel.poll(now_ns, &mut sink), 1, "what is in the ring belongs to the engine still");
    assert!(!channel.is_ready());
    let mut batch = vec![copy(4, 0, 64, 8)];
    channel.submit(&mut batch);
    assert_eq!(batch.len(), 1, "it takes none while it recovers");
    sink.extend(settle(&mut channel, &mut now_ns));
    let halted = IoatError::Halted(ChannelErrors::SOURCE_ADDRESS);
    assert_eq!(results(&sink), [(1, Ok(())), (2, Err(halted)), (3, Err(IoatError::Aborted))]);
    assert_eq!(channel.resets(), 2);
    channel.submit(&mut batch);
    channel.device_mut().step(8);
    sink.clear();
    channel.poll(now_ns, &mut sink);
    assert_eq!(results(&sink), [(4, Ok(()))]);
}

#[test]
fn a_reset_on_request_aborts_what_the_engine_has_not_done() {
    let (mut channel, mut now_ns) = started(Model::new(16));
    channel.submit(&mut vec![copy(1, 0, 64, 8), copy(2, 0, 64, 8)]);
    channel.device_mut().step(1);
    let mut sink = Vec::new();
    channel.poll(now_ns, &mut sink);
    channel.reset(now_ns);
    sink.extend(settle(&mut channel, &mut now_ns));
    assert_eq!(results(&sink), [(1, Ok(())), (2, Err(IoatError::Aborted))]);
    assert!(channel.is_ready());
}

#[test]
fn an_engine_that_does_not_stop_keeps_the_memory_of_its_requests() {
    for (suspends, failure) in [(false, IoatFailure::SuspendTimeout), (true, IoatFailure::ResetTimeout)] {
        let (mut channel, mut now_ns) = started(Model::new(16));
        channel.submit(&mut vec![copy(1, 0, 64, 8)]);
        let fault = if suspends { IoatFault::NoReset } else { IoatFault::NoSuspend };
        channel.device_mut().engine.inject(fault);
        channel.reset(now_ns);
        assert!(settle(&mut channel, &mut now_ns).is_empty());
        assert_eq!((channel.failure(), channel.deadline(now_ns)), (Some(failure), None));
        channel.submit(&mut vec![copy(2, 0, 64, 8)]);
        let mut sink = Vec::new();
        channel.poll(now_ns, &mut sink);
        assert_eq!(results(&sink), [(2, Err(IoatError::Failed(failure)))]);
        // Its DMA was disabled.
        assert_eq!(channel.into_parts().1, [1]);
    }
}

#[test]
fn engines_that_are_not_known_or_do_not_start_are_refused() {
    let refused = |disturb: &dyn Fn(&mut Model)| {
        let mut model = Model::new(16);
        disturb(&mut model);
        match Channel::start(model, 0) {
            Err(failure) => failure,
            Ok(mut channel) => {
                settle(&mut channel, &mut 0);
                channel.failure().unwrap()
            }
        }
    };
    assert_eq!(refused(&|model| model.engine.version = 0x20), IoatFailure::Version(0x20));
    assert_eq!(refused(&|model| model.engine.version = 0x40), IoatFailure::Version(0x40));
    assert_eq!(refused(&|model| model.is_gone = true), IoatFailure::Version(0xff));
    assert_eq!(refused(&|model| model.engine.transfer_capacity = 11), IoatFailure::TransferCapacity(11));
    assert_eq!(refused(&|model| model.engine.inject(IoatFault::StopAfter(0))), IoatFailure::StartTimeout);
    let halts = |model: &mut Model| model.engine.inject(IoatFault::HaltEvery(1));
    assert_eq!(refused(&halts), IoatFailure::Start(ChannelErrors::READ_DATA));
    assert_eq!(refused(&|model| model.forged = Some(RING_AT + 64)), IoatFailure::Completion(RING_AT + 64));
    for entries in [2, RING_ENTRIES_MAX * 2] {
        assert_eq!(Channel::start(Model::new(entries), 0).err(), Some(IoatFailure::Ring(entries)));
    }
}

#[test]
fn a_word_that_no_engine_writes_fails_the_channel() {
    for (word, failure) in [
        (RING_AT + 3 * 64, IoatFailure::Completion(RING_AT + 3 * 64)),
        (RING_AT - 64, IoatFailure::Completion(RING_AT - 64)),
        (RING_AT + 16 * 64, IoatFailure::Completion(RING_AT + 16 * 64)),
        (!0x3f, IoatFailure::Completion(!0x3f)),
        (u64::MAX, IoatFailure::State(7)),
    ] {
        let (mut channel, now_ns) = started(Model::new(16));
        channel.submit(&mut vec![copy(1, 0, 64, 8)]);
        channel.device_mut().forged = Some(word);
        let mut sink = Vec::new();
        channel.poll(now_ns, &mut sink);
        assert_eq!((channel.failure(), sink.len(), channel.in_flight()), (Some(failure), 0, 1), "{word:#x}");
    }
}

/// Polls a channel whose engine takes steps, for a time.
fn run(channel: &mut Channel, now_ns: &mut u64, time_ns: u64) -> Vec<IoatCompletion<u64>> {
    let (mut sink, end_ns) = (Vec::new(), *now_ns + time_ns);
    while *now_ns < end_ns {
        channel.device_mut().step(8);
        channel.poll(*now_ns, &mut sink);
        *now_ns += RECHECK_NS * 10;
    }
    sink
}

#[test]
fn an_engine_that_completes_nothing_is_reset_and_given_up_when_that_does_not_help() {
    let (mut channel, mut now_ns) = started(Model::new(16));
    // One was executed at the start.
    channel.device_mut().engine.inject(IoatFault::StallAfter(2));
    channel.submit(&mut vec![copy(1, 0, 64, 8), copy(2, 0, 64, 8)]);
    let sink = run(&mut channel, &mut now_ns, COMPLETION_TIMEOUT_NS - 2 * RECHECK_NS * 10);
    assert_eq!(results(&sink), [(1, Ok(()))], "the time is not over");
    channel.device_mut().engine.clear_faults();
    channel.device_mut().engine.inject(IoatFault::StopAfter(2));
    let sink = run(&mut channel, &mut now_ns, COMPLETION_TIMEOUT_NS / 2);
    assert_eq!((results(&sink), channel.resets()), (vec![(2, Err(IoatError::Aborted))], 2));
    assert_eq!(channel.failure(), Some(IoatFailure::StartTimeout));
}

#[test]
fn an_engine_that_halts_again_and_again_is_given_up() {
    let (mut channel, mut now_ns) = started(Model::new(16));
    let bad = |owned| IoatRequest { op: IoatOp::Copy { from: 0x40, to: MEMORY_AT, bytes: 8 }, owned };
    for owned in 0..u64::from(FAULTS_MAX) {
        channel.submit(&mut vec![bad(owned)]);
        let sink = run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS);
        assert_eq!(results(&sink), [(owned, Err(IoatError::Halted(ChannelErrors::SOURCE_ADDRESS)))]);
    }
    // One that succeeds begins the count again.
    channel.submit(&mut vec![copy(90, 0, 64, 8)]);
    assert_eq!(results(&run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS)), [(90, Ok(()))]);
    for owned in 0..u64::from(FAULTS_MAX) + 1 {
        channel.submit(&mut vec![bad(owned)]);
        run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS);
    }
    assert_eq!(channel.failure(), Some(IoatFailure::Faults(FAULTS_MAX + 1)));
    assert_eq!(channel.into_parts().1, [u64::from(FAULTS_MAX)]);
}

#[test]
fn a_partial_copy_is_an_error_and_a_status_that_goes_backward_fails_the_channel() {
    let (mut channel, mut now_ns) = started(Model::new(16));
    channel.device_mut().engine.inject(IoatFault::PartialEvery(2));
    channel.submit(&mut vec![copy(1, 0, 64, 8)]);
    let sink = run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS);
    assert_eq!(results(&sink), [(1, Err(IoatError::Halted(ChannelErrors::WRITE_DATA)))]);
    channel.device_mut().engine.clear_faults();
    channel.submit(&mut vec![copy(2, 0, 64, 8), copy(3, 0, 64, 8)]);
    assert_eq!(run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS).len(), 2);
    channel.device_mut().engine.inject(IoatFault::BackwardAfter(0));
    channel.submit(&mut vec![copy(4, 0, 64, 8)]);
    assert!(run(&mut channel, &mut now_ns, STEP_TIMEOUT_NS).is_empty());
    assert_eq!(channel.failure(), Some(IoatFailure::Completion(RING_AT)));
}

proptest! {
    #[test]
    fn every_request_completes_once_in_order_whatever_the_engine_does(
        sizes in prop::collection::vec(1..9000u64, 1..60),
        steps in prop::collection::vec(0..6u32, 1..40),
        halts in prop::option::of(1..40u64),
        forged in prop::option::of((0..40usize, any::<u64>())),
    ) {
        let (mut channel, mut now_ns) = started(Model::new(16));
        if let Some(every) = halts {
            channel.device_mut().engine.inject(IoatFault::HaltEvery(every));
        }
        let request = |(owned, bytes): (u64, &u64)| copy(owned, 0, DATA_BYTES - 9000, *bytes);
        let mut batch: Vec<_> = (0..).zip(&sizes).map(request).collect();
        let mut sink = Vec::new();
        for round in 0..4000 {
            channel.submit(&mut batch);
            if let Some((at, word)) = forged && at == round {
                channel.device_mut().forged = Some(word);
            }
            channel.device_mut().step(steps[round % steps.len()] + u32::from(round > 400));
            channel.poll(now_ns, &mut sink);
            channel.device_mut().forged = None;
            now_ns += RECHECK_NS;
        }
        let done: Vec<u64> = sink.iter().map(|one| one.owned).collect();
        if channel.failure().is_none() {
            prop_assert_eq!(done, (0..sizes.len() as u64).collect::<Vec<_>>());
        } else {
            // What the engine may still write is kept, and each is there once.
            let mut all = done;
            all.extend(channel.into_parts().1);
            all.extend(batch.iter().map(|request| request.owned));
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.len() as u64).collect::<Vec<_>>());
        }
    }
}
