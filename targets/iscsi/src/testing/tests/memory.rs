//! Initiators that keep the memory of their commands, beside others.

use super::*;

/// Blocks of 64 KiB.
const BLOCKS: u16 = 128;
const BYTES: usize = BLOCKS as usize * BLOCK_BYTES;

/// A session of the initiator at `peer`, of the 256 that it may have.
fn begin_as(target: &mut SimulatedTarget, peer: &str, session: u8, keys: &[(&str, &str)]) -> Initiator {
    let id = target.connect_from(peer);
    let mut initiator =
        Initiator { id, received: Vec::new(), cmd_sn: 1, header_digest: false, data_digest: false };
    let name = format!("{INITIATOR}:{peer}");
    let all = [&[("InitiatorName", name.as_str()), ("TargetName", NODE)], keys].concat();
    initiator.send(target, &login_as(session, &all));
    assert_eq!(LoginResponse::decode(&initiator.read(target).header).unwrap().status, 0);
    initiator.command(target, [0; 16], 0, (false, false), &[], true);
    assert_eq!(initiator.read(target).sense(), (0x29, 0));
    initiator
}

/// Whether a read and a write of 64 KiB are answered within 20 ms: others have their turns, too.
fn is_served(initiator: &mut Initiator, target: &mut SimulatedTarget) -> bool {
    let before = target.now_ns;
    let data = vec![7; BYTES];
    initiator.write(target, 0, &data, 0, 0, BYTES);
    let read = initiator.read_blocks(target, 0, BLOCKS, BYTES as u32);
    read == data && target.now_ns - before < 20_000_000
}

#[test]
fn initiators_that_announce_data_and_send_none_or_never_read_do_not_stop_others() {
    const HOSTILE: u8 = 120;
    let unasked: &[(&str, &str)] = &[("InitialR2T", "No"), ("FirstBurstLength", "65536")];
    let asked: &[(&str, &str)] = &[("ImmediateData", "No")];
    // What they announce comes unasked, or is asked for by R2Ts. The last read, and take no answers.
    for (kind, keys) in [unasked, asked, &[]].into_iter().enumerate() {
        let mut target = SimulatedTarget::with_memory(16 << 20);
        let mut other = begin_as(&mut target, "10.0.0.7:1", 1, &[]);
        let mut same = begin_as(&mut target, "10.0.0.1:1", 200, &[]);
        for _ in 0..2 {
            assert!(is_served(&mut other, &mut target) && is_served(&mut same, &mut target));
            target.now_ns += 1_000_000_000;
        }
        let mut hostile: Vec<_> =
            (0..HOSTILE).map(|session| begin_as(&mut target, "10.0.0.1:2", session, keys)).collect();
        for initiator in &mut hostile {
            for _ in 0..8 {
                let length = u32::from(BLOCKS) * BLOCK_BYTES as u32;
                let (is_final, is_read) = (kind != 0, kind == 2);
                let cdb = transfer(if is_read { READ } else { WRITE }, 0, BLOCKS);
                initiator.command(&mut target, cdb, length, (is_read, !is_read), &[], is_final);
            }
            assert!(is_served(&mut other, &mut target) && is_served(&mut same, &mut target), "kind {kind}");
        }
        for second in 1..=6 {
            target.now_ns += 1_000_000_000;
            assert!(is_served(&mut other, &mut target), "kind {kind}, second {second}");
            assert!(is_served(&mut same, &mut target), "kind {kind}, second {second}");
        }
        let left = target.group.connections().len() - 2;
        assert!(left < usize::from(HOSTILE) / 2, "kind {kind}: {left} are left, although others lack memory");
        let mut late = begin_as(&mut target, "10.0.0.8:1", 1, &[]);
        assert!(is_served(&mut late, &mut target), "kind {kind}");
    }
}

#[test]
fn an_initiator_that_is_disconnected_for_its_data_gets_a_message() {
    let mut target = plain_target();
    let mut initiator = begin_as(&mut target, "10.0.0.7:1", 1, &[("ImmediateData", "No")]);
    initiator.command(&mut target, transfer(WRITE, 0, BLOCKS), BYTES as u32, (false, true), &[], true);
    assert_eq!(initiator.read(&mut target).opcode(), Opcode::R2t);
    // A ping that is sent after 30 s is progress.
    assert!(initiator.seconds_until_closed(&mut target, 80).is_some());
    let last = initiator.received.len() - HEADER_BYTES;
    let message = AsyncMessage::decode(&initiator.received[last..]).unwrap();
    assert_eq!(message.event, u8::from(AsyncEvent::ConnectionDropped));
}

#[test]
fn without_memory_for_unasked_data_a_command_ends_with_task_set_full_if_others_wait_for_theirs() {
    let mut target = SimulatedTarget::with_memory(2 << 20);
    let keys = [("InitialR2T", "No"), ("FirstBurstLength", "65536"), ("ImmediateData", "No")];
    let mut initiator = begin_as(&mut target, "10.0.0.7:1", 1, &keys);
    // What others hold: all that the core has beside first windows.
    for peer in ["10.0.0.1:1", "10.0.0.2:1"] {
        let mut silent = begin_as(&mut target, peer, 1, &keys);
        for _ in 0..8 {
            silent.command(&mut target, transfer(WRITE, 0, BLOCKS), BYTES as u32, (false, true), &[], false);
        }
        target.poll();
    }
    let tags: Vec<u32> = (0..8)
        .map(|_| {
            initiator.command(
                &mut target,
                transfer(WRITE, 0, BLOCKS),
                BYTES as u32,
                (false, true),
                &[],
                false,
            )
        })
        .collect();
    // The data of all comes after all commands, in their order.
    for tag in &tags {
        let pdu = DataOut {
            initiator_task_tag: *tag,
            target_transfer_tag: RESERVED_TAG,
            is_final: true,
            ..DataOut::default()
        };
        initiator.data_out(&mut target, pdu, &[5; BYTES]);
    }
    let statuses: Vec<u8> = tags.iter().map(|_| initiator.read(&mut target).response().status).collect();
    let full = statuses.iter().filter(|status| **status == ScsiStatus::TaskSetFull as u8).count();
    assert!((1..8).contains(&full), "{statuses:?}");
    assert!(statuses.iter().all(|status| *status == 0 || *status == ScsiStatus::TaskSetFull as u8));
    // The session continues.
    assert_eq!(initiator.read_blocks(&mut target, 0, BLOCKS, BYTES as u32), [5; BYTES]);
}

#[test]
fn what_answers_have_on_the_heap_is_bounded_for_who_does_not_read() {
    let mut target = plain_target();
    let mut initiator = begin_as(&mut target, "10.0.0.7:1", 1, &[("MaxRecvDataSegmentLength", "65536")]);
    let ping = ping(&initiator);
    const PINGS: usize = 256;
    let sent = pdu(&ping.to_bytes(), &[7; 64 << 10]).repeat(PINGS);
    let (mut rest, mut idle) = (&sent[..], 0);
    while idle < 100 {
        match target.send(initiator.id, rest) {
            TransferResult::Bytes(count) => (rest, idle) = (&rest[count..], 0),
            _ => idle += 1,
        }
        target.poll();
    }
    let accepted = sent.len() - rest.len();
    assert!(accepted < 1 << 20, "{accepted} bytes of pings whose answers are not read");
    // It goes on when they are read.
    for _ in 0..PINGS {
        if let TransferResult::Bytes(count) = target.send(initiator.id, rest) {
            rest = &rest[count..];
        }
        assert_eq!(initiator.read(&mut target).data, [7; 64 << 10]);
    }
    assert!(rest.is_empty());
}
