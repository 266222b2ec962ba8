use super::*;

fn id(device: u8) -> TransportId {
    transport_id(PciAddress::new(0, 1, device, 0).unwrap())
}

fn function(device: u8, is_ours: bool) -> HotplugFunction {
    HotplugFunction { id: id(device), is_ours }
}

const PERIOD: Duration = Duration::from_millis(100);

#[test]
fn what_is_inserted_is_attached_once_and_what_is_removed_is_detached() {
    let (mut plan, now) = (HotplugPlan::default(), Instant::now());
    let listed = vec![function(1, true), function(2, false)];
    assert_eq!(plan.update(Some(listed), &[], now), [HotplugAction::Attach(id(1))]);
    plan.attached(&id(1));
    assert_eq!(plan.update(None, &[id(1)], now), []);
    // Another driver is bound to the second, and the third comes.
    let listed = vec![function(1, true), function(2, true), function(3, true)];
    let actions = plan.update(Some(listed), &[id(1)], now);
    assert_eq!(actions, [HotplugAction::Attach(id(2)), HotplugAction::Attach(id(3))]);
    plan.attached(&id(2));
    plan.attached(&id(3));
    // One that a request has attached is detached as well when it goes.
    let actions = plan.update(Some(vec![function(2, true)]), &[id(1), id(2), id(3), id(4)], now);
    assert_eq!(actions, [1, 3, 4].map(|device| HotplugAction::Detach(id(device))));
    let actions = plan.update(Some(vec![function(1, true), function(2, true)]), &[id(2)], now);
    assert_eq!(actions, [HotplugAction::Attach(id(1))], "it has returned");
}

#[test]
fn what_was_detached_by_request_is_left_alone_until_it_is_removed() {
    let (mut plan, now) = (HotplugPlan::default(), Instant::now());
    let listed = || Some(vec![function(1, true), function(2, true)]);
    // While hot plug was off.
    plan.detached(&id(1));
    assert_eq!(plan.update(listed(), &[id(2)], now), []);
    // Its driver releases it because it is to be ejected: it must not be attached again meanwhile.
    assert_eq!(plan.update(listed(), &[], now), []);
    assert_eq!(plan.update(None, &[], now), []);
    assert_eq!(plan.update(Some(vec![function(2, true)]), &[], now), []);
    assert_eq!(plan.update(listed(), &[], now), [HotplugAction::Attach(id(1))]);
    // The kernel's driver had it in between.
    plan.attached(&id(1));
    assert_eq!(plan.update(Some(vec![function(1, true), function(2, false)]), &[id(1)], now), []);
    assert_eq!(plan.update(listed(), &[id(1)], now), [HotplugAction::Attach(id(2))]);
    // Attached and detached by request.
    plan.detached(&id(1));
    plan.attached(&id(1));
    assert_eq!(plan.update(listed(), &[id(1), id(2)], now), []);
}

#[test]
fn attempts_are_repeated_at_growing_intervals() {
    let (mut plan, start) = (HotplugPlan::default(), Instant::now());
    let attach = [HotplugAction::Attach(id(1))];
    assert_eq!(plan.update(Some(vec![function(1, true)]), &[], start), attach);
    assert!(plan.failed(&id(1), start, PERIOD));
    assert_eq!(plan.update(None, &[], start), []);
    let (mut now, mut intervals) = (start, Vec::new());
    for _ in 0..10 {
        let next = plan.next_attempt().unwrap();
        intervals.push(next.duration_since(now).as_millis());
        now = next;
        assert_eq!(plan.update(None, &[], now), attach);
        assert!(!plan.failed(&id(1), now, PERIOD), "it is not reported again");
    }
    assert_eq!(intervals, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000]);
    assert_eq!(plan.update(Some(Vec::new()), &[], now), []);
    assert_eq!(plan.next_attempt(), None);
}

/// A directory like `/`, with PCI functions.
struct FakeSystem(PathBuf);

impl FakeSystem {
    fn new() -> FakeSystem {
        let root = std::env::temp_dir().join(format!("ringbolt-hotplug-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
        FakeSystem(root)
    }

    fn add(&self, address: &str, class: &str, driver: &str) {
        let directory = self.0.join("sys/bus/pci/devices").join(address);
        std::fs::create_dir(&directory).unwrap();
        for (name, text) in [("vendor", "0x1b36"), ("device", "0x0010"), ("class", class)] {
            std::fs::write(directory.join(name), format!("{text}\n")).unwrap();
        }
        self.bind(address, driver);
    }

    fn bind(&self, address: &str, driver: &str) {
        let link = self.0.join("sys/bus/pci/devices").join(address).join("driver");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
    }

    fn remove(&self, address: &str) {
        std::fs::remove_dir_all(self.0.join("sys/bus/pci/devices").join(address)).unwrap();
    }
}

impl Drop for FakeSystem {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_bus_lists_controllers_when_functions_or_their_drivers_change() {
    let system = FakeSystem::new();
    system.add("0000:01:01.0", "0x010802", "vfio-pci");
    system.add("0000:01:02.0", "0x010802", "nvme");
    system.add("0000:01:03.0", "0x020000", "vfio-pci");
    let mut bus = PciBus::new(&system.0);
    bus.events = None;
    assert_eq!(bus.functions().unwrap(), Some(vec![function(1, true), function(2, false)]));
    for _ in 1..LOOKS_UNCHANGED_MAX {
        assert_eq!(bus.functions().unwrap(), None);
    }
    assert!(bus.functions().unwrap().is_some(), "now and then all are listed");
    system.bind("0000:01:02.0", "uio_pci_generic");
    assert_eq!(bus.functions().unwrap(), Some(vec![function(1, true), function(2, true)]));
    system.remove("0000:01:01.0");
    assert_eq!(bus.functions().unwrap(), Some(vec![function(2, true)]));
    bus.has_events = true;
    assert!(bus.functions().unwrap().is_some(), "the kernel reported a change");
    assert!(bus.has(&id(1)));
    assert!(!bus.has(&TransportId("nvme+vfio-user:/tmp/x".parse().unwrap())));
    std::fs::remove_dir_all(system.0.join("sys")).unwrap();
    assert_eq!(bus.functions().unwrap(), Some(Vec::new()), "a system without PCI");
}

#[test]
fn a_wait_ends_when_it_is_woken() {
    let system =
        FakeSystem(std::env::temp_dir().join(format!("ringbolt-hotplug-wait-{}", std::process::id())));
    let wake = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    let start = Instant::now();
    let mut bus = PciBus::new(&system.0);
    bus.wait(wake.as_fd(), Duration::from_secs(60));
    bus.events = None;
    bus.wait(wake.as_fd(), Duration::from_secs(60));
    assert!(start.elapsed() < Duration::from_secs(30));
}
