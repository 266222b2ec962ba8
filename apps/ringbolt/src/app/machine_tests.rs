//! Tests of what is reported of the reactors.

use bdev::{Access, Registry};
use control::ManagedReactor;
use control::json::{Value, json};
use reactor::{ReactorConfig, ReactorHandle, Reactors};

use super::{App, StartOptions};

#[test]
fn io_channels_are_those_that_are_open() {
    let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
    let managed = |handle: &ReactorHandle| ManagedReactor { handle: handle.clone(), thread_id: 0 };
    let managed = reactors.handles().iter().map(managed).collect();
    let app = App::start(Registry::new(), managed, StartOptions::default()).unwrap();
    let null = json!({ "name": "N", "num_blocks": 8, "block_size": 512 });
    app.control.invoke("bdev_null_create", null).unwrap();
    let channels = || {
        let answer = app.control.invoke("thread_get_io_channels", Value::Null).unwrap();
        answer["threads"][0].clone()
    };
    // The examinations of a new bdev have channels too.
    let none = json!({ "name": "reactor_0", "io_channels": [] });
    while channels() != none {}
    let (registry, control) = (app.registry.clone(), app.control.clone());
    let with_two = reactors.handles()[0].call(move |core| {
        let device = registry.open("N", Access::ReadOnly).unwrap();
        let _channels = (device.channel(core).unwrap(), device.channel(core).unwrap());
        control.invoke("thread_get_io_channels", Value::Null).unwrap()
    });
    let expected = json!([{ "name": "bdev_N", "ref": 2 }]);
    assert_eq!(with_two.unwrap()["threads"][0]["io_channels"], expected);
    while channels() != none {}
}

#[test]
fn buffer_stats_count_what_the_reactors_have_taken() {
    let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
    let managed = |handle: &ReactorHandle| ManagedReactor { handle: handle.clone(), thread_id: 0 };
    let managed = reactors.handles().iter().map(managed).collect();
    let app = App::start(Registry::new(), managed, StartOptions::default()).unwrap();
    let stats = || app.control.invoke("iobuf_get_stats", Value::Null).unwrap();
    let count = |pool: &str, name: &str| stats()[0][pool][name].as_u64().unwrap();
    let both = |name: &str| (count("small_pool", name), count("large_pool", name));
    let (cache, main) = (both("cache"), both("main"));
    reactors.handles()[0]
        .call(|core| (0..10).for_each(|_| drop((core.pool().take(8192), core.pool().take(65536)))))
        .unwrap();
    let taken = |name: &str, before: (u64, u64)| (both(name).0 - before.0, both(name).1 - before.1);
    let (cached, refilled) = (taken("cache", cache), taken("main", main));
    assert_eq!((cached.0 + refilled.0, cached.1 + refilled.1), (10, 10), "{}", stats());
    assert!(refilled.0 <= 1 && refilled.1 <= 1, "{}", stats());
    assert_eq!((both("retry"), &stats()[0]["module"]), ((0, 0), &json!("reactor")));
    assert_eq!(both("cache_size"), (0, 0));
}
