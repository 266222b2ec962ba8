//! An in-memory model of the kernel's behaviour on bind and unbind, which can be made to fail after any number of
//! effects (writes).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

use crate::bind::host_system::{DeviceClaim, HostSystem};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FakeNode {
    File(String),
    Link(String),
}

#[derive(Clone, Debug, Default)]
pub(super) struct FakeHost(RefCell<FakeHostState>);

#[derive(Clone, Debug, Default)]
struct FakeHostState {
    files: BTreeMap<String, FakeNode>,
    /// The nodes that a function's nvme driver created, while the function is not bound to it.
    unplugged: BTreeMap<String, BTreeMap<String, FakeNode>>,
    /// Nodes that are opened exclusively.
    busy: BTreeSet<String>,
    /// Signatures on devices: node, offset, bytes.
    signatures: Vec<(String, u64, Vec<u8>)>,
    /// Number of effects until everything fails.
    effects_left: Option<usize>,
    /// Drivers whose bind always fails.
    broken: BTreeSet<String>,
    pub(super) effects: usize,
}

fn missing() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOENT)
}

impl FakeHost {
    pub(super) fn file(&self, path: &str, text: &str) {
        self.0.borrow_mut().files.insert(path.to_string(), FakeNode::File(text.to_string()));
    }

    pub(super) fn link(&self, path: &str, to: &str) {
        self.0.borrow_mut().files.insert(path.to_string(), FakeNode::Link(to.to_string()));
    }

    pub(super) fn append(&self, path: &str, line: &str) {
        let text = self.read(path).unwrap_or_default() + line;
        self.file(path, &text);
    }

    pub(super) fn set_busy(&self, node: &str) {
        self.0.borrow_mut().busy.insert(node.to_string());
    }

    pub(super) fn add_signature(&self, node: &str, offset: u64, bytes: &[u8]) {
        self.0.borrow_mut().signatures.push((node.to_string(), offset, bytes.to_vec()));
    }

    pub(super) fn break_driver(&self, driver: &str) {
        self.0.borrow_mut().broken.insert(driver.to_string());
    }

    /// All files and links.
    pub(super) fn tree(&self) -> BTreeMap<String, FakeNode> {
        self.0.borrow().files.clone()
    }

    pub(super) fn effects(&self) -> usize {
        self.0.borrow().effects
    }

    /// Allows `effects` more effects; afterwards every operation fails, as after the process was killed.
    pub(super) fn kill_after(&self, effects: Option<usize>) {
        self.0.borrow_mut().effects_left = effects;
    }

    pub(super) fn driver(&self, name: &str) {
        self.file(&format!("sys/bus/pci/drivers/{name}/bind"), "");
        self.file(&format!("sys/bus/pci/drivers/{name}/unbind"), "");
    }

    pub(super) fn function(&self, address: &str, group: Option<u32>) {
        let real = format!("sys/devices/pci0000:00/{address}");
        self.link(
            &format!("sys/bus/pci/devices/{address}"),
            &format!("../../../devices/pci0000:00/{address}"),
        );
        for (name, text) in [
            ("vendor", "0x1b36\n"),
            ("device", "0x0010\n"),
            ("class", "0x010802\n"),
            ("numa_node", "-1\n"),
            ("driver_override", "(null)\n"),
        ] {
            self.file(&format!("{real}/{name}"), text);
        }
        if let Some(group) = group {
            self.link(&format!("{real}/iommu_group"), &format!("../../../kernel/iommu_groups/{group}"));
            let member = format!("sys/kernel/iommu_groups/{group}/devices/{address}");
            self.link(&member, &format!("../../../../devices/pci0000:00/{address}"));
        }
    }

    /// Adds a block device below a directory, with its node and its link.
    pub(super) fn block(&self, directory: &str, name: &str, number: &str) {
        self.file(&format!("{directory}/{name}/dev"), &format!("{number}\n"));
        self.file(&format!("{directory}/{name}/size"), "256\n");
        let up = directory.strip_prefix("sys/").unwrap_or(directory);
        self.link(&format!("sys/class/block/{name}"), &format!("../../{up}/{name}"));
        self.file(&format!("dev/{name}"), "");
    }

    /// Binds a function directly, for test setup.
    pub(super) fn start_bound(&self, address: &str, driver: &str) {
        self.0.borrow_mut().bind(address, driver);
    }

    fn query<T>(&self, read: impl FnOnce(&FakeHostState) -> io::Result<T>) -> io::Result<T> {
        let state = self.0.borrow();
        if state.effects_left == Some(0) { Err(io::Error::other("killed")) } else { read(&state) }
    }

    fn effect<T>(&self, change: impl FnOnce(&mut FakeHostState) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.0.borrow_mut();
        if state.effects_left == Some(0) {
            return Err(io::Error::other("killed"));
        }
        state.effects += 1;
        if let Some(left) = &mut state.effects_left {
            *left -= 1;
        }
        change(&mut state)
    }
}

impl FakeHostState {
    /// Resolves every link of a path.
    fn real(&self, path: &str) -> Option<String> {
        let mut todo: Vec<String> = path.split('/').rev().map(str::to_string).collect();
        let mut done: Vec<String> = Vec::new();
        let mut links = 0;
        while let Some(part) = todo.pop() {
            match part.as_str() {
                "" | "." => {}
                ".." => drop(done.pop()),
                _ => {
                    done.push(part);
                    if let Some(FakeNode::Link(to)) = self.files.get(&done.join("/")) {
                        done.pop();
                        links += 1;
                        if links > 40 {
                            return None;
                        }
                        todo.extend(to.split('/').rev().map(str::to_string));
                    }
                }
            }
        }
        let real = done.join("/");
        let directory = format!("{real}/");
        let is_directory = || {
            self.files.range(directory.clone()..).next().is_some_and(|(key, _)| key.starts_with(&directory))
        };
        (self.files.contains_key(&real) || is_directory()).then_some(real)
    }

    fn text(&self, path: &str) -> Option<String> {
        match self.files.get(&self.real(path)?)? {
            FakeNode::File(text) => Some(text.clone()),
            FakeNode::Link(_) => None,
        }
    }

    fn directory(&self, address: &str) -> String {
        format!("sys/devices/pci0000:00/{address}")
    }

    fn group(&self, address: &str) -> Option<String> {
        let real = self.real(&format!("{}/iommu_group", self.directory(address)))?;
        real.rsplit('/').next().map(str::to_string)
    }

    fn is_bound(&self, address: &str) -> bool {
        self.files.contains_key(&format!("{}/driver", self.directory(address)))
    }

    fn bind(&mut self, address: &str, driver: &str) {
        let directory = self.directory(address);
        let link = format!("../../../bus/pci/drivers/{driver}");
        self.files.insert(format!("{directory}/driver"), FakeNode::Link(link));
        let link = format!("../../../../devices/pci0000:00/{address}");
        self.files.insert(format!("sys/bus/pci/drivers/{driver}/{address}"), FakeNode::Link(link));
        if driver == "nvme" {
            let back = self.unplugged.remove(address).unwrap_or_default();
            self.files.extend(back);
        } else if let (true, Some(group)) = (driver == "vfio-pci", self.group(address)) {
            self.files.insert(format!("dev/vfio/{group}"), FakeNode::File(String::new()));
        }
    }

    fn unbind(&mut self, address: &str, driver: &str) {
        let directory = self.directory(address);
        self.files.remove(&format!("{directory}/driver"));
        self.files.remove(&format!("sys/bus/pci/drivers/{driver}/{address}"));
        if driver == "nvme" {
            let blocks = self.files.keys().filter_map(|key| key.strip_prefix("sys/class/block/"));
            let is_below = |name: &&str| {
                let real = self.real(&format!("sys/class/block/{name}"));
                real.is_some_and(|real| real.starts_with(&format!("{directory}/")))
            };
            let names: Vec<String> = blocks.filter(is_below).map(str::to_string).collect();
            let goes = |key: &String| {
                key.starts_with(&format!("{directory}/nvme/"))
                    || names.iter().any(|name| {
                        *key == format!("sys/class/block/{name}") || *key == format!("dev/{name}")
                    })
            };
            let gone: BTreeMap<String, FakeNode> = self
                .files
                .iter()
                .filter(|(key, _)| goes(key))
                .map(|(key, node)| (key.clone(), node.clone()))
                .collect();
            self.files.retain(|key, _| !gone.contains_key(key));
            self.unplugged.insert(address.to_string(), gone);
        } else if let (true, Some(group)) = (driver == "vfio-pci", self.group(address)) {
            self.files.remove(&format!("dev/vfio/{group}"));
        }
    }

    /// The kernel's behaviour on a write to sysfs.
    fn write(&mut self, path: &str, text: &str) -> io::Result<()> {
        let real = self.real(path).ok_or_else(missing)?;
        let invalid = || io::Error::from_raw_os_error(libc::ENODEV);
        if let Some(directory) = real.strip_suffix("/driver_override") {
            let only = if text.trim().is_empty() { "(null)" } else { text.trim() };
            self.files.insert(format!("{directory}/driver_override"), FakeNode::File(format!("{only}\n")));
            return Ok(());
        }
        let words: Vec<&str> = real.split('/').collect();
        match words[..] {
            ["sys", "bus", "pci", "drivers", driver, "unbind"] => {
                if !self.files.contains_key(&format!("sys/bus/pci/drivers/{driver}/{text}")) {
                    return Err(invalid());
                }
                self.unbind(text, driver);
                Ok(())
            }
            ["sys", "bus", "pci", "drivers", driver, "bind"] => {
                let only =
                    self.text(&format!("{}/driver_override", self.directory(text))).ok_or_else(invalid)?;
                let matches = only.trim() == driver || only.trim() == "(null)" && driver == "nvme";
                if !matches || self.is_bound(text) || self.broken.contains(driver) {
                    return Err(invalid());
                }
                self.bind(text, driver);
                Ok(())
            }
            [.., "nr_hugepages"] => {
                // The system has memory for 1,000 hugepages.
                let wanted = text.parse::<u64>().map_err(|_| io::ErrorKind::InvalidInput)?.min(1000);
                self.files.insert(real, FakeNode::File(format!("{wanted}\n")));
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(libc::EACCES)),
        }
    }
}

impl HostSystem for FakeHost {
    fn read(&self, path: &str) -> io::Result<String> {
        self.query(|state| state.text(path).ok_or_else(missing))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.query(|state| {
            let prefix = format!("{}/", state.real(path).ok_or_else(missing)?);
            let below = state.files.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
            let names =
                below.filter_map(|(key, _)| key[prefix.len()..].split('/').next().map(str::to_string));
            Ok(names.collect::<BTreeSet<_>>().into_iter().collect())
        })
    }

    fn resolve(&self, path: &str) -> io::Result<String> {
        self.query(|state| state.real(path).ok_or_else(missing))
    }

    fn read_device(&self, path: &str, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.query(|state| {
            for (_, at, bytes) in state.signatures.iter().filter(|(node, _, _)| node == path) {
                for (index, byte) in bytes.iter().enumerate() {
                    let place = (at + index as u64).checked_sub(offset);
                    if let Some(slot) = place.and_then(|place| out.get_mut(place as usize)) {
                        *slot = *byte;
                    }
                }
            }
            Ok(())
        })
    }

    fn claim(&self, path: &str) -> io::Result<DeviceClaim> {
        self.query(|state| {
            let real = state.real(path).ok_or_else(missing)?;
            match state.busy.contains(&real) {
                true => Err(io::Error::from_raw_os_error(libc::EBUSY)),
                false => Ok(DeviceClaim(None)),
            }
        })
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        self.effect(|state| state.write(path, text))
    }

    fn store(&self, path: &str, text: &str) -> io::Result<()> {
        self.effect(|state| {
            state.files.insert(path.to_string(), FakeNode::File(text.to_string()));
            Ok(())
        })
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.effect(|state| {
            state.files.remove(path);
            Ok(())
        })
    }
}
