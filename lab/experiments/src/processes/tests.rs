use std::io::Read;

use super::*;

/// A shell that starts a process in a session of its own, as fio does with its jobs, and waits for it. The
/// returned pipe ends when both are gone.
fn family(processes: &mut Processes) -> (Process, io::PipeReader) {
    let (mut reader, writer) = io::pipe().unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", "setsid sh -c 'echo ready; exec sleep 100' & wait"])
        .stdin(Stdio::null())
        .stdout(writer);
    let process = processes.spawn(&mut command).unwrap();
    drop(command);
    let mut line = [0; 6];
    reader.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"ready\n");
    (process, reader)
}

/// Returns once no process of the family has the pipe open. Fails where one has it open for longer than anything
/// here takes.
fn wait_for_end(pipe: io::PipeReader) {
    let pipe = OwnedFd::from(pipe);
    let mut polled = [PollFd::new(&pipe, PollFlags::IN)];
    let ready = poll(&mut polled, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap();
    assert_eq!(ready, 1, "a process of the family is left");
    assert_eq!(rustix::io::read(&pipe, &mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_process_that_left_its_group_ends_with_the_process_that_started_it() {
    let mut processes = Processes::new();
    let (mut process, pipe) = family(&mut processes);
    let (_other, other_pipe) = family(&mut processes);
    process.end(Duration::ZERO);
    wait_for_end(pipe);
    assert_eq!(kill_tagged(&process.tag), Killed::default());
    assert_eq!(processes.live.iter().filter(|one| one.is_alive()).count(), 1, "the other one lives");
    assert_eq!(processes.end_all(), Vec::<String>::new());
    wait_for_end(other_pipe);
}

#[test]
fn a_tag_that_another_begins_with_is_another_tag() {
    let mut processes = Processes::new();
    let (mut process, pipe) = family(&mut processes);
    let pid = process.id();
    assert!(carries(pid, &processes.tag) && carries(pid, &process.tag));
    let shorter = &process.tag[..process.tag.len() - 1];
    assert!(!carries(pid, shorter), "{shorter} is no tag of {}", process.tag);
    assert!(!carries(std::process::id(), &processes.tag));
    process.end(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn the_watchdog_ends_everything_when_its_input_ends() {
    let mut processes = Processes::new();
    let (mut process, pipe) = family(&mut processes);
    let (reader, mut writer) = io::pipe().unwrap();
    let thread = std::thread::spawn(move || watchdog(reader));
    writer.write_all(format!("{}\n", processes.tag).as_bytes()).unwrap();
    assert!(matches!(process.try_wait(), Ok(None)));
    drop(writer);
    thread.join().unwrap();
    wait_for_end(pipe);
    process.end(Duration::ZERO);
}

#[test]
fn a_watchdog_that_was_not_given_a_whole_tag_ends_nothing() {
    let mut processes = Processes::new();
    let (mut process, pipe) = family(&mut processes);
    watchdog(processes.tag.as_bytes());
    watchdog(&b""[..]);
    assert!(matches!(process.try_wait(), Ok(None)));
    process.end(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn a_process_number_that_is_used_again_is_not_signalled() {
    let mut processes = Processes::new();
    let (mut process, pipe) = family(&mut processes);
    let real = processes.live[0].clone();
    let earlier = Identity { started: "1".into(), ..real.clone() };
    assert_eq!(kill_identified(&[earlier]), Killed::default());
    assert!(real.is_alive());
    let killed = kill_identified(std::slice::from_ref(&real));
    assert_eq!((killed.ended.len(), killed.remaining.len()), (1, 0));
    assert!(!real.is_alive());
    process.end(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn nothing_runs_where_its_identity_cannot_be_recorded() {
    let mut processes = Processes::new();
    processes.record_in("/nowhere/of/that/name".into());
    let (mut reader, writer) = io::pipe().unwrap();
    let mut command = Command::new("sleep");
    command.arg("1000").stdout(writer);
    assert!(processes.spawn(&mut command).is_err());
    drop(command);
    assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_process_that_was_killed_is_gone_though_its_parent_did_not_wait() {
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    assert!(start_time(pid).is_some_and(|at| at.parse::<u64>().is_ok()));
    child.kill().unwrap();
    let zombie = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
    while !zombie() {
        std::thread::yield_now();
    }
    assert_eq!(start_time(pid), None);
    child.wait().unwrap();
}
