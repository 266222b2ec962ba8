//! Sessions with several connections.

use super::*;

const PAIR: [(&str, &str); 2] = [("MaxConnections", "8"), ("ImmediateData", "No")];

/// A login of a connection: the session that it joins, its identifier, and the next command of the session.
fn login_of(name: &str, tsih: u16, cid: u16, cmd_sn: u32, keys: &[(&str, &str)]) -> Vec<u8> {
    let all = [&[("InitiatorName", name), ("TargetName", NODE)], keys].concat();
    let mut bytes = login(&all);
    bytes[14..16].copy_from_slice(&tsih.to_be_bytes());
    bytes[20..22].copy_from_slice(&cid.to_be_bytes());
    bytes[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
    bytes
}

/// The first connection of a session, with identifier 1, and the session's.
fn first(target: &mut SimulatedTarget) -> (Initiator, u16) {
    let mut initiator = Initiator::connect(target);
    initiator.send(target, &login_of(INITIATOR, 0, 1, 1, &PAIR));
    let received = initiator.read(target);
    let response = LoginResponse::decode(&received.header).unwrap();
    assert_eq!((response.status, response.transit), (0, true));
    assert!(String::from_utf8(received.data).unwrap().contains("MaxConnections=3\0"));
    initiator.command(target, [0; 16], 0, (false, false), &[], true);
    assert_eq!(initiator.read(target).sense(), (0x29, 0));
    (initiator, response.tsih)
}

/// A further connection; the status if it is refused.
fn join(
    target: &mut SimulatedTarget,
    name: &str,
    tsih: u16,
    cid: u16,
    cmd_sn: u32,
) -> Result<Initiator, u16> {
    let mut initiator = Initiator::connect(target);
    initiator.send(target, &login_of(name, tsih, cid, cmd_sn, &[]));
    let response = LoginResponse::decode(&initiator.read(target).header).unwrap();
    if response.status != 0 {
        return Err(response.status);
    }
    assert_eq!((response.tsih, response.exp_cmd_sn, response.max_cmd_sn), (tsih, cmd_sn, cmd_sn + 7));
    Ok(initiator)
}

fn ready(initiator: &mut Initiator, target: &mut SimulatedTarget, cmd_sn: u32) {
    initiator.cmd_sn = cmd_sn;
    initiator.command(target, [0; 16], 0, (false, false), &[], true);
}

/// Polls, and returns whether anything has arrived.
fn has_answer(initiator: &mut Initiator, target: &mut SimulatedTarget) -> bool {
    for _ in 0..100 {
        target.poll();
        target.receive(initiator.id, &mut initiator.received);
    }
    !initiator.received.is_empty()
}

#[test]
fn a_command_waits_for_those_before_it_on_other_connections() {
    let mut target = plain_target();
    let (mut one, tsih) = first(&mut target);
    // The session is the same, so that there is no unit attention of a new nexus.
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    ready(&mut two, &mut target, 3);
    assert!(!has_answer(&mut two, &mut target));
    // What is executed at once overtakes nothing on its connection.
    ready(&mut one, &mut target, 2);
    assert_eq!(one.read(&mut target).response().initiator_task_tag, 102);
    let response = two.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.status, response.exp_cmd_sn), (103, 0, 4));
    // A number that was used on the other connection is ignored.
    ready(&mut one, &mut target, 3);
    assert!(!has_answer(&mut one, &mut target));
    ready(&mut one, &mut target, 4);
    let response = one.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.max_cmd_sn), (104, 11));
}

#[test]
fn commands_of_many_connections_are_all_executed_once() {
    for seed in 0..12 {
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 300, break_per_mille: 0 };
        let mut target = SimulatedTarget::new(seed, faults);
        target.moves = seed % 2 == 1;
        let mut random = WyRand::new(seed);
        let (one, tsih) = first(&mut target);
        let mut all = vec![one];
        all.push(join(&mut target, INITIATOR, tsih, 2, 2).unwrap());
        all.push(join(&mut target, INITIATOR, tsih, 3, 2).unwrap());
        let (mut cmd_sn, mut max_cmd_sn, mut unanswered, mut polls) = (2u32, 9u32, Vec::new(), 0);
        while cmd_sn < 200 || !unanswered.is_empty() {
            polls += 1;
            assert!(polls < 1_000_000, "seed {seed}: it stands still");
            if cmd_sn < 200 && cmd_sn <= max_cmd_sn {
                let by = random.below(3) as usize;
                all[by].cmd_sn = cmd_sn;
                let data = [cmd_sn as u8; BLOCK_BYTES];
                let tag = all[by].command(
                    &mut target,
                    transfer(WRITE, cmd_sn, 1),
                    BLOCK_BYTES as u32,
                    (false, true),
                    &[],
                    true,
                );
                unanswered.push((by, tag, data));
                cmd_sn += 1;
                continue;
            }
            target.poll();
            for (by, initiator) in all.iter_mut().enumerate() {
                target.receive(initiator.id, &mut initiator.received);
                if initiator.received.len() < HEADER_BYTES {
                    continue;
                }
                let received = initiator.read(&mut target);
                let tag = u32::from_be_bytes(received.header[16..20].try_into().unwrap());
                let at = unanswered.iter().position(|one| (one.0, one.1) == (by, tag)).unwrap();
                if received.opcode() == Opcode::R2t {
                    let r2t = R2t::decode(&received.header).unwrap();
                    let data = unanswered[at].2;
                    initiator.answer(&mut target, &r2t, &data, 200);
                    continue;
                }
                let response = received.response();
                assert_eq!(response.status, 0, "seed {seed}");
                max_cmd_sn = max_cmd_sn.max(response.max_cmd_sn);
                unanswered.remove(at);
            }
        }
        // The last answer precedes the end of its command.
        assert_eq!(max_cmd_sn, cmd_sn + 6);
        all[2].cmd_sn = cmd_sn;
        let read = all[2].read_blocks(&mut target, 2, 198, 198 * BLOCK_BYTES as u32);
        let expected = (2..200u32).flat_map(|number| [number as u8; BLOCK_BYTES]);
        assert!(read.into_iter().eq(expected), "seed {seed}");
        assert!(!target.moves || target.group.totals().moved > 5, "seed {seed}");
    }
}

#[test]
fn a_connection_is_replaced_with_what_it_has_not_answered() {
    let mut target = plain_target();
    let (mut one, tsih) = first(&mut target);
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    two.cmd_sn = 2;
    two.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    assert_eq!(two.read(&mut target).opcode(), Opcode::R2t);
    // Its command makes room again, which `join` checks.
    let mut again = join(&mut target, INITIATOR, tsih, 2, 3).unwrap();
    assert!(two.try_read(&mut target).is_none());
    ready(&mut again, &mut target, 3);
    assert_eq!(again.read(&mut target).response().status, 0);
    ready(&mut one, &mut target, 4);
    assert_eq!(one.read(&mut target).response().status, 0);
    assert_eq!(target.group.connections().len(), 2);
    // A new session between the same ports ends all connections.
    let (mut new, other) = first(&mut target);
    assert_ne!(other, tsih);
    assert!(one.try_read(&mut target).is_none() && again.try_read(&mut target).is_none());
    ready(&mut new, &mut target, 2);
    assert_eq!(new.read(&mut target).response().status, 0);
    assert_eq!(join(&mut target, INITIATOR, tsih, 2, 3).err(), Some(LoginStatus::NoSession.into()));
}

#[test]
fn a_session_outlives_a_connection_that_breaks() {
    let mut target = plain_target();
    let (one, tsih) = first(&mut target);
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    target.initiators.close(one.id);
    ready(&mut two, &mut target, 2);
    assert_eq!(two.read(&mut target).response().status, 0);
    let mut again = join(&mut target, INITIATOR, tsih, 1, 3).unwrap();
    ready(&mut again, &mut target, 3);
    assert_eq!(again.read(&mut target).response().status, 0);
}

#[test]
fn sessions_admit_connections_between_their_ports_up_to_the_limit() {
    let mut target = plain_target();
    let (_one, tsih) = first(&mut target);
    let refused = |status: LoginStatus| Some(u16::from(status));
    let other = "iqn.2026-11.io.ringbolt:other";
    assert_eq!(join(&mut target, other, tsih, 2, 2).err(), refused(LoginStatus::NoSession));
    assert_eq!(join(&mut target, INITIATOR, tsih + 1, 2, 2).err(), refused(LoginStatus::NoSession));
    let _two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    let _three = join(&mut target, INITIATOR, tsih, 3, 2).unwrap();
    assert_eq!(join(&mut target, INITIATOR, tsih, 4, 2).err(), refused(LoginStatus::TooManyConnections));
    // An initiator that does not ask for connections has one.
    let mut single = Initiator::connect(&mut target);
    single.send(&mut target, &login_of(other, 0, 1, 1, &[]));
    let response = LoginResponse::decode(&single.read(&mut target).header).unwrap();
    let joined = join(&mut target, other, response.tsih, 2, 1);
    assert_eq!(joined.err(), refused(LoginStatus::TooManyConnections));
}

#[test]
fn logouts_close_a_connection_or_the_session() {
    let mut target = plain_target();
    let (mut one, tsih) = first(&mut target);
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    let mut three = join(&mut target, INITIATOR, tsih, 3, 2).unwrap();
    let mut log_out = |target: &mut SimulatedTarget, reason: LogoutReason, cid: u16, cmd_sn: u32| {
        let request =
            LogoutRequest { initiator_task_tag: 4, cmd_sn, cid, reason: reason.into(), ..Default::default() };
        one.send_pdu(target, &request.to_bytes(), &[]);
        LogoutReply::decode(&one.read(target).header).unwrap().response
    };
    let unknown = log_out(&mut target, LogoutReason::CloseConnection, 7, 2);
    assert_eq!(unknown, u8::from(LogoutResponse::NoConnection));
    let closed = log_out(&mut target, LogoutReason::CloseConnection, 2, 3);
    assert_eq!(closed, u8::from(LogoutResponse::Closed));
    assert!(two.try_read(&mut target).is_none());
    ready(&mut three, &mut target, 4);
    assert_eq!(three.read(&mut target).response().status, 0);
    let closed = log_out(&mut target, LogoutReason::CloseSession, 0, 5);
    assert_eq!(closed, u8::from(LogoutResponse::Closed));
    assert!(three.try_read(&mut target).is_none());
    assert!(one.try_read(&mut target).is_none());
    assert_eq!(target.group.connections().len(), 0);
}

#[test]
fn a_function_on_one_connection_aborts_the_commands_before_it_on_all() {
    let mut target = plain_target();
    let (mut one, tsih) = first(&mut target);
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    let request = TaskManagementRequest {
        immediate: true,
        function: TaskFunction::AbortTaskSet.into(),
        initiator_task_tag: 5,
        cmd_sn: 3,
        ..TaskManagementRequest::default()
    };
    // Command 2 has not arrived: the function concerns it, and waits.
    one.send_pdu(&mut target, &request.to_bytes(), &[]);
    assert!(!has_answer(&mut one, &mut target));
    two.cmd_sn = 2;
    two.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    let answer = TaskManagementResponse::decode(&one.read(&mut target).header).unwrap();
    assert_eq!((answer.initiator_task_tag, answer.response), (5, u8::from(TaskResponse::Complete)));
    assert_eq!(two.read(&mut target).opcode(), Opcode::R2t);
    assert!(!has_answer(&mut two, &mut target));
    ready(&mut two, &mut target, 3);
    let response = two.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.max_cmd_sn), (103, 10));
}

#[test]
fn a_command_that_never_comes_costs_the_connections_that_wait_for_it() {
    let mut target = plain_target();
    let (mut one, tsih) = first(&mut target);
    let mut two = join(&mut target, INITIATOR, tsih, 2, 2).unwrap();
    ready(&mut two, &mut target, 3);
    let seconds = two.seconds_until_closed(&mut target, 100).unwrap();
    assert!((29..=36).contains(&seconds), "{seconds}");
    ready(&mut one, &mut target, 2);
    // It was silent, and was pinged.
    let answers = std::iter::repeat_with(|| one.read(&mut target));
    let answer = answers.into_iter().find(|answer| answer.opcode() != Opcode::NopIn).unwrap();
    assert_eq!(answer.response().status, 0);
}
