use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;
use crate::{ByName, ConfigFile, Examination, JobHandle, Method, NoParameters};

/// Records the calls of its life cycle.
struct Recorder {
    name: &'static str,
    log: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn note(&self, what: &str) {
        self.log.lock().unwrap().push(format!("{} {what}", self.name));
    }
}

macro_rules! recorder {
    ($type:ident, $name:literal, $depends_on:expr, $is_subsystem:literal, $methods:expr) => {
        struct $type(Recorder);

        impl Module for $type {
            const NAME: &'static str = $name;
            const DEPENDS_ON: &'static [&'static str] = $depends_on;
            const IS_SUBSYSTEM: bool = $is_subsystem;

            fn methods() -> Vec<Method<$type>> {
                $methods
            }

            fn start(&self) -> Result<(), RpcError> {
                self.0.note("start");
                Ok(())
            }

            fn drain(&self) {
                self.0.note("drain");
            }

            fn stop(&self) {
                self.0.note("stop");
            }

            fn save(&self) -> Vec<Value> {
                vec![json!({ "method": $name })]
            }

            fn examine_config(&self, bdev: &str) {
                self.0.note(bdev);
            }

            fn report(&self) -> Value {
                json!($name)
            }
        }
    };
}

recorder!(
    Disks,
    "disks",
    &[],
    true,
    vec![Method::prepared_update("disks_last", last_note, |_, last| Ok(last))]
);
recorder!(Paths, "paths", &["disks"], false, Vec::new());
recorder!(Target, "target", &["paths", "disks"], true, Vec::new());

/// What was noted last, when the method was prepared.
fn last_note(disks: &Disks, _: NoParameters) -> Result<Option<String>, RpcError> {
    Ok(disks.0.log.lock().unwrap().last().cloned())
}

/// A module that panics when it examines.
struct Panicking;

impl Module for Panicking {
    const NAME: &'static str = "panicking";

    fn methods() -> Vec<Method<Panicking>> {
        vec![Method::update("still_works", |_: &Panicking, _: NoParameters| Ok(true))]
    }

    fn examine_config(&self, bdev: &str) {
        panic!("{bdev} is not examined");
    }
}

#[test]
fn a_module_that_panics_when_it_examines_keeps_no_method_waiting() {
    let builder = ControlPlane::builder(Vec::new()).module(&Arc::new(Panicking));
    let examiner = builder.examiner();
    let plane = builder.start(None).unwrap();
    examiner.appeared("M", []);
    examiner.wait();
    assert_eq!(plane.invoke("still_works", Value::Null).unwrap(), json!(true));
}

#[test]
fn modules_start_after_what_they_depend_on_and_stop_before() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let recorder = |name| Recorder { name, log: log.clone() };
    let builder = ControlPlane::builder(Vec::new())
        .module(&Arc::new(Target(recorder("target"))))
        .module(&Arc::new(Paths(recorder("paths"))))
        .module(&Arc::new(Disks(recorder("disks"))));
    let examiner = builder.examiner();
    let plane = builder.start(None).unwrap();
    examiner.appeared("M", []);
    examiner.wait();
    plane.drain();
    plane.stop();
    let expected = "disks start, paths start, target start, disks M, paths M, target M, target drain, paths drain, \
        disks drain, target stop, paths stop, disks stop";
    assert_eq!(log.lock().unwrap().join(", "), expected);
    let call = |name| plane.invoke(name, Value::Null).unwrap();
    let expected = json!([{ "subsystem": "disks", "depends_on": [] },
        { "subsystem": "target", "depends_on": ["disks"] }]);
    assert_eq!(call("framework_get_subsystems"), expected);
    let config_of = |name: &str| plane.invoke("framework_get_config", json!({ "name": name }));
    assert_eq!(config_of("disks").unwrap(), json!([{ "method": "disks" }]));
    assert_eq!(config_of("vmd").unwrap(), json!([]), "SPDK has it, and there is nothing to configure");
    assert!(config_of("nothing").is_err());
    let expected = json!([{ "subsystem": "disks", "config": [{ "method": "disks" }] },
        { "subsystem": "target", "config": [{ "method": "target" }] }]);
    assert_eq!(call("save_config")["subsystems"], expected);
    assert_eq!(
        call("framework_get_modules")[1],
        json!({ "name": "paths", "depends_on": ["disks"],
        "methods": 0, "report": "paths" })
    );
}

#[test]
#[should_panic(expected = "dependencies of target are missing or form a cycle")]
fn a_missing_dependency_is_an_error_of_the_program() {
    let target = Target(Recorder { name: "target", log: Arc::default() });
    let _ = ControlPlane::builder(Vec::new()).module(&Arc::new(target)).start(None);
}

/// A module whose methods wait for the test.
struct Slow {
    entered: Sender<()>,
    leave: Mutex<Receiver<()>>,
}

impl Module for Slow {
    const NAME: &'static str = "slow";

    fn methods() -> Vec<Method<Slow>> {
        vec![
            Method::update("slow_update", |slow: &Slow, _: NoParameters| {
                slow.wait();
                Ok(())
            }),
            Method::prepared_update("slow_prepared", slow_prepare, |_, ()| Ok(())),
            Method::job("slow_job", slow_job),
            Method::job("updating_job", |slow: &Slow, _: NoParameters, job| {
                job.update(|| slow.wait());
                Ok(())
            }),
            Method::update("fast_update", |_, params: ByName| Ok(params.name)),
        ]
    }
}

impl Slow {
    fn wait(&self) {
        self.entered.send(()).unwrap();
        self.leave.lock().unwrap().recv().unwrap();
    }
}

fn slow_prepare(slow: &Slow, _: NoParameters) -> Result<(), RpcError> {
    slow.wait();
    Ok(())
}

fn slow_job(slow: &Slow, params: ByName, job: &JobHandle) -> Result<String, RpcError> {
    job.set_total(10, "bytes");
    job.advance(3);
    slow.wait();
    if params.name == "commits" {
        job.commit()?;
        slow.wait();
    }
    job.check()?;
    Ok(params.name)
}

fn slow() -> (Arc<ControlPlane>, Receiver<()>, Sender<()>) {
    let ((entered, has_entered), (leave, may_leave)) = (channel(), channel());
    let module = Arc::new(Slow { entered, leave: Mutex::new(may_leave) });
    (ControlPlane::builder(Vec::new()).module(&module).start(None).unwrap(), has_entered, leave)
}

#[test]
fn an_examination_waits_for_the_update() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let disks = Disks(Recorder { name: "disks", log: log.clone() });
    let ((entered, has_entered), (leave, may_leave)) = (channel(), channel());
    let slow = Slow { entered, leave: Mutex::new(may_leave) };
    let builder = ControlPlane::builder(Vec::new()).module(&Arc::new(disks)).module(&Arc::new(slow));
    let examiner = builder.examiner();
    let plane = builder.start(None).unwrap();
    let update = std::thread::spawn(move || plane.invoke("slow_update", Value::Null));
    has_entered.recv().unwrap();
    examiner.appeared("M", []);
    let (done, is_done) = channel();
    let waiting = examiner.clone();
    let wait = std::thread::spawn(move || {
        waiting.wait();
        let _ = done.send(());
    });
    assert!(is_done.recv_timeout(Duration::from_millis(100)).is_err(), "it is examined during the update");
    assert_eq!(*log.lock().unwrap(), ["disks start"]);
    leave.send(()).unwrap();
    update.join().unwrap().unwrap();
    is_done.recv().unwrap();
    wait.join().unwrap();
    assert_eq!(log.lock().unwrap()[1], "disks M");
}

/// Notes which devices are read, and whether that was asked for.
struct Reader(Mutex<Vec<String>>);

impl Module for Reader {
    const NAME: &'static str = "reader";

    fn methods() -> Vec<Method<Reader>> {
        Vec::new()
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        let how = if examination.is_requested() { "requested" } else { "appeared" };
        self.0.lock().unwrap().push(format!("{bdev} {how}"));
    }
}

#[test]
fn a_device_that_a_configuration_uses_is_read_only_on_request() {
    let reader = Arc::new(Reader(Mutex::default()));
    let builder = ControlPlane::builder(Vec::new()).module(&reader);
    let examiner = builder.examiner();
    let plane = builder.start(None).unwrap();
    let used = plane.use_bdevs(["M", "store/volume", "E5E5"].map(str::to_string).into());
    let again = plane.use_bdevs(["M".to_string()].into());
    let read = |devices: &[(&str, &[&str])]| {
        for (bdev, other_names) in devices {
            examiner.appeared(bdev, other_names.iter().copied());
            examiner.wait();
        }
        std::mem::take(&mut *reader.0.lock().unwrap())
    };
    let devices: [(&str, &[&str]); 4] =
        [("M", &[]), ("N", &["store/volume"]), ("O", &["e5e5"]), ("P", &["p"])];
    assert_eq!(read(&devices), ["P appeared"]);
    examiner.request("M");
    examiner.wait();
    assert_eq!(read(&[]), ["M requested"]);
    drop(used);
    assert_eq!(read(&devices), ["N appeared", "O appeared", "P appeared"], "another configuration uses M");
    drop(again);
    assert_eq!(read(&devices[..1]), ["M appeared"]);
}

#[test]
fn an_update_waits_for_the_examinations_of_earlier_ones() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let disks = Disks(Recorder { name: "disks", log: log.clone() });
    let ((entered, _has_entered), (_leave, may_leave)) = (channel(), channel());
    let slow = Slow { entered, leave: Mutex::new(may_leave) };
    let builder = ControlPlane::builder(Vec::new()).module(&Arc::new(disks)).module(&Arc::new(slow));
    let examiner = builder.examiner();
    let plane = builder.start(None).unwrap();
    // The thread that examines is not as fast as a call.
    for number in 0..200 {
        examiner.appeared(&format!("M{number}"), []);
        plane.invoke("fast_update", json!({ "name": "f" })).unwrap();
        assert_eq!(log.lock().unwrap().last().unwrap(), &format!("disks M{number}"));
        // One with two parts looks for devices in its first one.
        examiner.appeared(&format!("N{number}"), []);
        let seen = plane.invoke("disks_last", json!({})).unwrap();
        assert_eq!(seen, format!("disks N{number}"));
    }
}

#[test]
fn only_updates_keep_updates_waiting() {
    let (plane, entered, leave) = slow();
    for (method, keeps_waiting) in [("slow_update", true), ("slow_prepared", false), ("slow_job", false)] {
        let params = if method == "slow_job" { json!({ "name": "a" }) } else { Value::Null };
        let other = plane.clone();
        let slow = std::thread::spawn(move || other.invoke(method, params));
        entered.recv().unwrap();
        let other = plane.clone();
        let (done, is_done) = channel();
        let fast = std::thread::spawn(move || done.send(other.invoke("fast_update", json!({ "name": "f" }))));
        if keeps_waiting {
            assert!(is_done.recv_timeout(Duration::from_millis(100)).is_err(), "{method}");
        } else {
            assert_eq!(is_done.recv().unwrap().unwrap(), "f", "{method}");
        }
        leave.send(()).unwrap();
        slow.join().unwrap().unwrap();
        fast.join().unwrap().unwrap();
    }
}

#[test]
fn a_part_of_a_job_can_be_an_update() {
    let (plane, entered, leave) = slow();
    let call = |method: &'static str| {
        let plane = plane.clone();
        std::thread::spawn(move || plane.invoke(method, Value::Null))
    };
    for [first, second] in [["slow_update", "updating_job"], ["updating_job", "slow_update"]] {
        let first = call(first);
        entered.recv().unwrap();
        let second = call(second);
        assert!(entered.recv_timeout(Duration::from_millis(100)).is_err(), "the second waits for the first");
        leave.send(()).unwrap();
        entered.recv().unwrap();
        leave.send(()).unwrap();
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
    }
}

#[test]
fn a_job_has_a_handle_shows_progress_and_is_cancelled() {
    let (plane, entered, leave) = slow();
    let state = |job: &Value| plane.invoke("job_get", json!({ "job": job })).unwrap()[0].clone();
    let start = |name: &str| {
        let job = plane.invoke("slow_job", json!({ "name": name, "background": true })).unwrap();
        entered.recv().unwrap();
        job["job"].clone()
    };
    let until = |job: &Value, wanted: &str| {
        while state(job)["state"] == "running" {
            std::thread::yield_now();
        }
        assert_eq!(state(job)["state"], wanted);
    };
    let done = start("a");
    let shown = state(&done);
    assert_eq!(
        (&shown["state"], &shown["done"], &shown["total"], &shown["unit"], &shown["method"]),
        (&json!("running"), &json!(3), &json!(10), &json!("bytes"), &json!("slow_job"))
    );
    leave.send(()).unwrap();
    until(&done, "done");
    assert_eq!(state(&done)["result"], "a");
    let cancel = |job: &Value| plane.invoke("job_cancel", json!({ "job": job })).map_err(|error| error.code);
    assert_eq!(cancel(&done), Err(RpcError::EALREADY));
    assert_eq!(cancel(&json!(99)), Err(RpcError::ENODEV));

    let ended = start("b");
    assert_eq!(cancel(&ended), Ok(json!(true)));
    leave.send(()).unwrap();
    until(&ended, "cancelled");
    assert_eq!(state(&ended)["error"]["code"], RpcError::ECANCELED);

    let committed = start("commits");
    leave.send(()).unwrap();
    entered.recv().unwrap();
    assert_eq!(cancel(&committed), Err(RpcError::EBUSY));
    leave.send(()).unwrap();
    until(&committed, "done");
    assert_eq!(plane.invoke("job_get", Value::Null).unwrap().as_array().map(Vec::len), Some(3));
}

#[test]
fn ended_jobs_are_forgotten_and_running_ones_are_limited() {
    let (plane, entered, leave) = slow();
    let call = || plane.invoke("slow_job", json!({ "name": "a", "background": true }));
    for _ in 0..64 {
        call().unwrap();
        entered.recv().unwrap();
    }
    assert_eq!(call().unwrap_err().code, RpcError::EBUSY);
    for _ in 0..64 {
        leave.send(()).unwrap();
    }
    let listed = || plane.invoke("job_get", Value::Null).unwrap().as_array().unwrap().clone();
    while listed().iter().any(|job| job["state"] == "running") {
        std::thread::yield_now();
    }
    call().unwrap();
    entered.recv().unwrap();
    assert_eq!((listed().len(), &listed()[0]["job"]), (64, &json!(2)));
    leave.send(()).unwrap();
}

#[test]
fn log_levels_and_flags_are_set() {
    let plane = ControlPlane::builder(Vec::new()).start(None).unwrap();
    let call = |method: &str, params: Value| plane.invoke(method, params).map_err(|error| error.code);
    assert_eq!(call("log_get_print_level", Value::Null), Ok(json!("NOTICE")));
    assert_eq!(call("log_get_level", Value::Null), Ok(json!("DISABLED")));
    assert_eq!(call("log_set_print_level", json!({ "level": "LOUD" })), Err(RpcError::INVALID_PARAMS));
    assert_eq!(call("log_set_print_level", json!({ "level": "DEBUG" })), Ok(json!(true)));
    assert_eq!(call("log_get_print_level", Value::Null), Ok(json!("DEBUG")));
    for (method, level) in [("log_set_print_level", "notice"), ("log_set_level", "Disabled")] {
        assert_eq!(call(method, json!({ "level": level })), Ok(json!(true)), "in any case");
    }
    assert_eq!(call("log_get_print_level", Value::Null), Ok(json!("NOTICE")));
    assert_eq!(call("log_set_flag", json!({ "flag": "nvme_of" })), Err(RpcError::INVALID_PARAMS));
    assert_eq!(call("log_enable_timestamps", json!({})), Err(RpcError::INVALID_PARAMS));
    assert_eq!(call("log_enable_timestamps", json!({ "enabled": false })), Ok(json!(true)));
    for (method, flag, nvmf, rpc) in [
        ("log_set_flag", "nvmf", true, false),
        ("log_set_flag", "all", true, true),
        ("log_clear_flag", "rpc", true, false),
        ("log_clear_flag", "all", false, false),
    ] {
        call(method, json!({ "flag": flag })).unwrap();
        let flags = call("log_get_flags", Value::Null).unwrap();
        assert_eq!((&flags["nvmf"], &flags["rpc"]), (&json!(nvmf), &json!(rpc)), "{method} {flag}");
    }
}

/// A module whose disk has a volume, which is found when the disk was read.
struct Found {
    examiner: Arc<Examiner>,
    refused: Sender<()>,
    refusals: Mutex<Option<Receiver<()>>>,
    is_found: Arc<AtomicBool>,
}

impl Module for Found {
    const NAME: &'static str = "found";

    fn methods() -> Vec<Method<Found>> {
        vec![
            Method::update("disk_create", |found: &Found, _: NoParameters| {
                found.examiner.appeared("disk", []);
                Ok(true)
            }),
            Method::update("volume_export", |found: &Found, _: NoParameters| {
                if found.is_found.load(Ordering::SeqCst) {
                    return Ok(true);
                }
                found.refused.send(()).unwrap();
                Err(RpcError::new(RpcError::ENODEV, "no volume is there"))
            }),
        ]
    }

    /// Reads until a call was refused.
    fn examine_disk(&self, _: &str, examination: Examination) {
        let (refusals, is_found) = (self.refusals.lock().unwrap().take().unwrap(), self.is_found.clone());
        std::thread::spawn(move || {
            refusals.recv().unwrap();
            examination.finish(move || is_found.store(true, Ordering::SeqCst));
        });
    }
}

#[test]
fn a_configuration_may_name_what_is_found_on_a_disk_that_takes_long_to_read() {
    let builder = ControlPlane::builder(Vec::new());
    let (refused, refusals) = channel();
    let found = Found {
        examiner: builder.examiner(),
        refused,
        refusals: Mutex::new(Some(refusals)),
        is_found: Arc::default(),
    };
    let plane = builder.module(&Arc::new(found)).start(None).unwrap();
    let call = |method: &str| format!(r#"{{"method":"{method}"}}"#);
    let section = |calls: String| format!(r#"{{"subsystems":[{{"subsystem":"bdev","config":[{calls}]}}]}}"#);
    let config =
        |calls: String| ConfigFile::parse("a.json", section(calls).as_bytes(), plane.catalog()).unwrap();
    config(format!("{},{}", call("disk_create"), call("volume_export"))).apply(&plane).unwrap();
}

#[test]
fn a_call_that_fails_when_all_disks_were_read_is_made_once() {
    let builder = ControlPlane::builder(Vec::new());
    let (refused, refusals) = channel();
    let found =
        Found { examiner: builder.examiner(), refused, refusals: Mutex::new(None), is_found: Arc::default() };
    let plane = builder.module(&Arc::new(found)).start(None).unwrap();
    let error = plane.invoke_configured("volume_export", Value::Null).unwrap_err();
    assert_eq!((error.code, refusals.try_iter().count()), (RpcError::ENODEV, 1));
}
