//! The RPC server against clients that send too much, read nothing or stay without a call.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use control::json::{Value, json};
use control::{ByName, ControlPlane, ListenSocket, Method, Module, NoParameters, RpcServer, client};

/// A method that answers when the test says so, and one with a long answer.
struct Test {
    entered: Sender<()>,
    leave: std::sync::Mutex<Receiver<()>>,
    notes: Mutex<Vec<String>>,
}

impl Module for Test {
    const NAME: &'static str = "test";

    fn methods() -> Vec<Method<Test>> {
        vec![
            Method::query("wait", |test, _: NoParameters| {
                test.entered.send(()).unwrap();
                test.leave.lock().unwrap().recv().unwrap();
                Ok(true)
            }),
            Method::query("long", |test, _: NoParameters| {
                // They need not be counted.
                let _ = test.entered.send(());
                Ok("x".repeat(1 << 20))
            }),
            Method::update("note", |test: &Test, params: ByName| {
                test.notes.lock().unwrap().push(params.name);
                Ok(true)
            }),
        ]
    }
}

struct Rig {
    _server: RpcServer,
    path: PathBuf,
    entered: Receiver<()>,
    leave: Sender<()>,
    test: Arc<Test>,
}

fn rig(name: &str) -> Rig {
    let ((entered, has_entered), (leave, may_leave)) = (channel(), channel());
    let test = Arc::new(Test { entered, leave: may_leave.into(), notes: Mutex::default() });
    let plane = ControlPlane::builder(Vec::new()).module(&test).start(None).unwrap();
    let path = std::env::temp_dir().join(format!("ringbolt-server-{name}-{}.sock", std::process::id()));
    let server = RpcServer::start(plane, ListenSocket::bind(&path).unwrap()).unwrap();
    Rig { _server: server, path, entered: has_entered, leave, test }
}

impl Rig {
    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn call(&self, method: &str) -> Result<Value, client::CallError> {
        client::call(&self.path, method, Value::Null, Duration::from_secs(20))
    }

    /// Connects and makes a call, which is not answered yet.
    fn begin(&self, method: &str) -> UnixStream {
        let mut stream = self.connect();
        send(&mut stream, 1, method);
        stream
    }

    /// Sends bytes and returns what comes back until the server closes the connection. The server may do that
    /// before it has read everything.
    fn exchange(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        let mut sender = stream.try_clone().unwrap();
        let request = request.to_vec();
        let sent = std::thread::spawn(move || sender.write_all(&request));
        let mut answer = Vec::new();
        let mut bytes = [0; 4096];
        while let Ok(count) = stream.read(&mut bytes) {
            if count == 0 {
                break;
            }
            answer.extend_from_slice(&bytes[..count]);
        }
        let _ = sent.join().unwrap();
        String::from_utf8(answer).unwrap()
    }
}

fn send(stream: &mut UnixStream, id: u32, method: &str) {
    stream.write_all(json!({ "id": id, "method": method }).to_string().as_bytes()).unwrap();
}

/// The id of the next response, which is one line.
fn receive(stream: &mut UnixStream) -> Value {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') {
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&line));
        line.push(byte[0]);
    }
    let response: Value = control::json::from_slice(&line).unwrap();
    assert!(response.get("error").is_none(), "{response}");
    response["id"].clone()
}

#[test]
fn requests_beyond_a_limit_are_refused_before_they_are_parsed() {
    let rig = rig("limits");
    let many = format!("{{\"id\":1,\"method\":\"spdk_get_version\",\"params\":[{}1]}}", "1,".repeat(400_000));
    let long = format!("{{\"id\":1,\"method\":\"{}\"}}", "x".repeat(2 << 20));
    for (request, expected) in [
        (many.as_str(), "more than 131072 values"),
        (&long, "longer than 1 MiB"),
        (&"[".repeat(100_000), "more than 32 levels"),
        ("{]", "-32700"),
    ] {
        let answer = rig.exchange(request.as_bytes());
        assert!(answer.contains(expected) && answer.contains("-32700"), "{expected}: {answer}");
    }
    assert!(rig.call("spdk_get_version").is_ok());
}

#[test]
fn a_new_client_takes_the_place_of_the_one_that_is_idle_for_longest() {
    let rig = rig("idle");
    let mut busy = rig.connect();
    busy.write_all(&json!({ "id": 1, "method": "wait" }).to_string().into_bytes()).unwrap();
    rig.entered.recv().unwrap();
    let mut idle: Vec<UnixStream> = (0..63).map(|_| rig.connect()).collect();
    for _ in 0..3 {
        assert!(rig.call("spdk_get_version").is_ok(), "the operator gets in");
    }
    // The first of the idle ones was closed; the busy one, which is older, was not.
    assert_eq!(idle[0].read(&mut [0; 1]).unwrap(), 0);
    rig.leave.send(()).unwrap();
    let mut answer = [0; 256];
    let count = busy.read(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer[..count]).contains("\"result\":true"));
}

#[test]
fn responses_of_a_batch_are_sent_as_they_are_made() {
    let rig = rig("batch");
    let call = json!({ "id": 1, "method": "long" });
    let batch = Value::Array(vec![call; 8]).to_string();
    let mut stream = rig.connect();
    stream.write_all(batch.as_bytes()).unwrap();
    // More than a socket's buffer: what is not read yet waits in the server, one response at a time.
    let mut text = Vec::new();
    let mut bytes = vec![0; 64 << 10];
    while text.last() != Some(&b'\n') {
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0);
        text.extend_from_slice(&bytes[..count]);
    }
    let responses: Value = control::json::from_slice(&text).unwrap();
    assert_eq!(responses.as_array().map(Vec::len), Some(8));
}

#[test]
fn a_server_whose_socket_file_is_gone_ends() {
    let rig = rig("file-gone");
    std::fs::remove_file(&rig.path).unwrap();
    // Joins the thread that accepts connections.
    drop(rig);
}

#[test]
fn every_one_of_many_clients_at_once_is_answered() {
    let rig = rig("many");
    let clients: Vec<UnixStream> = (0..512).map(|_| rig.begin("spdk_get_version")).collect();
    for mut client in clients {
        assert_eq!(receive(&mut client), 1);
    }
}

#[test]
fn silent_clients_do_not_replace_one_that_calls() {
    let rig = rig("silent");
    let mut working = rig.begin("spdk_get_version");
    receive(&mut working);
    // It has been idle for longer than any of these.
    let silent: Vec<UnixStream> = (0..80).map(|_| rig.connect()).collect();
    assert!(rig.call("spdk_get_version").is_ok(), "the operator gets in");
    send(&mut working, 2, "spdk_get_version");
    assert_eq!(receive(&mut working), 2);
    drop(silent);
}

#[test]
fn a_call_does_not_wait_for_the_end_of_an_earlier_one() {
    let rig = rig("overtake");
    let mut stream = rig.begin("wait");
    rig.entered.recv().unwrap();
    for id in 2..10 {
        send(&mut stream, id, "spdk_get_version");
        assert_eq!(receive(&mut stream), id);
    }
    rig.leave.send(()).unwrap();
    assert_eq!(receive(&mut stream), 1);
}

#[test]
fn a_client_that_sends_no_more_gets_the_responses_of_what_runs() {
    let rig = rig("half-closed");
    let mut stream = rig.begin("wait");
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    rig.entered.recv().unwrap();
    rig.leave.send(()).unwrap();
    assert_eq!(receive(&mut stream), 1);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn calls_of_a_connection_start_in_order() {
    let rig = rig("order");
    let names: Vec<String> = (0..300).map(|name| name.to_string()).collect();
    let note = |(id, name): (usize, &String)| {
        json!({ "id": id, "method": "note", "params": { "name": name } }).to_string()
    };
    let requests: String = names.iter().enumerate().map(note).collect();
    let mut stream = rig.connect();
    stream.write_all(requests.as_bytes()).unwrap();
    let mut ids: Vec<u64> = names.iter().map(|_| receive(&mut stream).as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..300).collect::<Vec<u64>>());
    assert_eq!(*rig.test.notes.lock().unwrap(), names);
}

#[test]
fn the_calls_of_a_connection_that_run_at_once_are_limited() {
    let rig = rig("in-flight");
    let mut stream = rig.connect();
    for id in 0..20 {
        send(&mut stream, id, "wait");
    }
    (0..16).for_each(|_| rig.entered.recv().unwrap());
    assert!(rig.entered.recv_timeout(Duration::from_millis(100)).is_err(), "more than 16 run");
    assert!(rig.call("spdk_get_version").is_ok(), "another connection is not limited by it");
    (0..20).for_each(|_| rig.leave.send(()).unwrap());
    (0..20).for_each(|_| drop(receive(&mut stream)));
}

#[test]
fn calls_wait_while_much_of_what_was_asked_before_is_not_read() {
    const CALLS: usize = 16;
    let rig = rig("unread");
    let mut stream = rig.connect();
    (0..CALLS as u32).for_each(|id| send(&mut stream, id, "long"));
    // Four responses are on the way or wait. A slow machine starts a few more beside these.
    let mut begun = 0;
    while rig.entered.recv_timeout(Duration::from_millis(500)).is_ok() {
        begun += 1;
    }
    assert!((4..CALLS).contains(&begun), "{begun} calls have begun");
    let mut lines = 0;
    let mut bytes = vec![0; 64 << 10];
    while lines < CALLS {
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0, "{lines} responses");
        lines += bytes[..count].iter().filter(|byte| **byte == b'\n').count();
    }
    assert_eq!(rig.entered.try_iter().count(), CALLS - begun);
}
