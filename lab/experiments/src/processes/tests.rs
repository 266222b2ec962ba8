use std::io::Read;

use super::*;

/// Starts a shell whose child starts another session, as jobs of fio do. The returned pipe ends when both have ended.
fn family(processes: &mut RunProcesses) -> (RunProcess, io::PipeReader) {
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

/// Waits until no process has the pipe open; panics on timeout.
fn wait_for_end(pipe: io::PipeReader) {
    let pipe = OwnedFd::from(pipe);
    let mut polled = [PollFd::new(&pipe, PollFlags::IN)];
    let ready = poll(&mut polled, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap();
    assert_eq!(ready, 1, "a process of the family is left");
    assert_eq!(rustix::io::read(&pipe, &mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_process_in_another_session_ends_with_its_parent() {
    let mut processes = RunProcesses::new();
    let (mut process, pipe) = family(&mut processes);
    let (_other, other_pipe) = family(&mut processes);
    process.terminate(Duration::ZERO);
    wait_for_end(pipe);
    assert_eq!(kill_tagged(&process.tag), KillReport::default());
    assert_eq!(processes.alive.iter().filter(|one| one.is_alive()).count(), 1, "the other one lives");
    assert_eq!(processes.kill_all(), Vec::<String>::new());
    wait_for_end(other_pipe);
}

#[test]
fn a_prefix_of_a_tag_is_a_different_tag() {
    let mut processes = RunProcesses::new();
    let (mut process, pipe) = family(&mut processes);
    let pid = process.id();
    assert!(has_tag(pid, &processes.tag) && has_tag(pid, &process.tag));
    let shorter = &process.tag[..process.tag.len() - 1];
    assert!(!has_tag(pid, shorter), "{shorter} is no tag of {}", process.tag);
    assert!(!has_tag(std::process::id(), &processes.tag));
    process.terminate(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn the_watchdog_kills_all_tagged_processes_at_end_of_input() {
    let mut processes = RunProcesses::new();
    let (mut process, pipe) = family(&mut processes);
    let (reader, mut writer) = io::pipe().unwrap();
    let thread = std::thread::spawn(move || watchdog(reader));
    writer.write_all(format!("{}\n", processes.tag).as_bytes()).unwrap();
    assert!(matches!(process.try_wait(), Ok(None)));
    drop(writer);
    thread.join().unwrap();
    wait_for_end(pipe);
    process.terminate(Duration::ZERO);
}

#[test]
fn a_watchdog_without_a_complete_tag_kills_nothing() {
    let mut processes = RunProcesses::new();
    let (mut process, pipe) = family(&mut processes);
    watchdog(processes.tag.as_bytes());
    watchdog(&b""[..]);
    assert!(matches!(process.try_wait(), Ok(None)));
    process.terminate(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn a_reused_pid_is_not_signalled() {
    let mut processes = RunProcesses::new();
    let (mut process, pipe) = family(&mut processes);
    let real = processes.alive[0].clone();
    let earlier = ProcessIdentity { started: "1".into(), ..real.clone() };
    assert_eq!(kill_identified(&[earlier]), KillReport::default());
    assert!(real.is_alive());
    let killed = kill_identified(std::slice::from_ref(&real));
    assert_eq!((killed.ended.len(), killed.remaining.len()), (1, 0));
    assert!(!real.is_alive());
    process.terminate(Duration::ZERO);
    wait_for_end(pipe);
}

#[test]
fn nothing_runs_if_its_identity_cannot_be_recorded() {
    let mut processes = RunProcesses::new();
    processes.set_record_file("/nowhere/of/that/name".into());
    let (mut reader, writer) = io::pipe().unwrap();
    let mut command = Command::new("sleep");
    command.arg("1000").stdout(writer);
    assert!(processes.spawn(&mut command).is_err());
    drop(command);
    assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_zombie_counts_as_ended() {
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
