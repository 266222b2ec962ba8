//! What the control planes of all targets have in common: [`TargetControl`].

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use bdev::{DeviceEvent, Registry, SubscriptionId};
use reactor::ReactorHandle;

use crate::admissions::ConnectionLimits;
use crate::device_keys::DeviceKeys;
use crate::logins::GroupLimits;
use crate::protocol::TargetConfig;
use crate::publisher::Publisher;

/// What the control plane of a target keeps under its lock, which no core takes.
pub trait ControlledTarget: Sized + Send + 'static {
    /// The configuration that is published to every core; `()` if there is none.
    type Config: TargetConfig;
    /// What the lock is not needed for; `()` if there is nothing.
    type Shared: Send + Sync + 'static;

    /// A block device was removed or has another size. Called on the thread that changed it, without the
    /// lock, until the target [stops](TargetControl::stop).
    fn device_event(control: &TargetControl<Self>, event: &DeviceEvent);
}

/// The control plane's handle of a target: its state under a lock, the publisher of its configuration, the
/// keys of its block devices, and its subscription to their changes. Cheap to clone.
///
/// Order: [`lock`](Self::lock) for each change, [`stop`](Self::stop) once. The subscription does not keep the
/// target: it ends with the last handle. Calls may wait for cores, so a reactor's thread must not make them.
pub struct TargetControl<S: ControlledTarget>(Arc<ControlInner<S>>);

/// A [`TargetControl`] that does not keep the target, for threads that serve it.
pub struct WeakTargetControl<S: ControlledTarget>(Weak<ControlInner<S>>);

struct ControlInner<S: ControlledTarget> {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    publisher: Publisher<S::Config>,
    shared: S::Shared,
    keys: Mutex<DeviceKeys>,
    state: Mutex<S>,
    /// Changes with the state locked.
    is_stopping: AtomicBool,
    subscription: Mutex<Option<SubscriptionId>>,
}

/// The target is stopping and accepts no changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetStopping;

impl fmt::Display for TargetStopping {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the target is stopping")
    }
}

impl std::error::Error for TargetStopping {}

impl<S: ControlledTarget> TargetControl<S> {
    /// A target with this state, which follows the devices of `registry`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], shared: S::Shared, state: S) -> Self {
        let inner = Arc::new(ControlInner {
            registry,
            reactors: reactors.to_vec(),
            publisher: Publisher::default(),
            shared,
            keys: Mutex::default(),
            state: Mutex::new(state),
            is_stopping: AtomicBool::new(false),
            subscription: Mutex::new(None),
        });
        let weak = WeakTargetControl(Arc::downgrade(&inner));
        let id = inner.registry.subscribe(Box::new(move |event| {
            let Some(control) = weak.upgrade() else { return };
            if !matches!(event, DeviceEvent::Registered(_)) && !control.is_stopping() {
                S::device_event(&control, event);
            }
        }));
        *sync::lock(&inner.subscription) = Some(id);
        TargetControl(inner)
    }

    /// The block devices.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// The reactors of the program.
    pub fn reactors(&self) -> &[ReactorHandle] {
        &self.0.reactors
    }

    /// The configuration that cores have.
    pub fn publisher(&self) -> &Publisher<S::Config> {
        &self.0.publisher
    }

    /// What the lock is not needed for.
    pub fn shared(&self) -> &S::Shared {
        &self.0.shared
    }

    /// The state, for a change.
    ///
    /// # Errors
    /// The target is stopping.
    pub fn lock(&self) -> Result<MutexGuard<'_, S>, TargetStopping> {
        let state = self.lock_any();
        if self.is_stopping() { Err(TargetStopping) } else { Ok(state) }
    }

    /// The state, even of a target that is stopping.
    pub fn lock_any(&self) -> MutexGuard<'_, S> {
        sync::lock(&self.0.state)
    }

    /// Changes are rejected and devices not followed from now on. Returns the state, to close what listens.
    pub fn stop(&self) -> MutexGuard<'_, S> {
        // Not with the state locked, which the subscriber locks.
        let subscription = sync::lock(&self.0.subscription).take();
        subscription.into_iter().for_each(|id| self.0.registry.unsubscribe(id));
        let state = self.lock_any();
        self.0.is_stopping.store(true, Ordering::Relaxed);
        state
    }

    fn is_stopping(&self) -> bool {
        self.0.is_stopping.load(Ordering::Relaxed)
    }

    /// A key for a block device in the configuration's [`DeviceMap`](crate::DeviceMap).
    pub fn assign_key(&self) -> u32 {
        sync::lock(&self.0.keys).assign(self.0.publisher.applied_by_all())
    }

    /// The latest configuration lacks the devices with these keys, which are free when every core has applied
    /// it.
    pub fn retire_keys(&self, keys: impl IntoIterator<Item = u32>) {
        let generation = self.0.publisher.generation();
        let mut retired = sync::lock(&self.0.keys);
        keys.into_iter().for_each(|key| retired.retire(key, generation));
    }

    /// The limits of a target with these on connections; its requests go to the devices of the registry.
    pub fn group_limits(&self, connections: ConnectionLimits) -> GroupLimits {
        GroupLimits { connections, registry: Some(self.0.registry.clone()), ..GroupLimits::default() }
    }

    /// A handle that does not keep the target.
    pub fn downgrade(&self) -> WeakTargetControl<S> {
        WeakTargetControl(Arc::downgrade(&self.0))
    }
}

impl<S: ControlledTarget> WeakTargetControl<S> {
    /// The target, unless its last handle is gone.
    pub fn upgrade(&self) -> Option<TargetControl<S>> {
        self.0.upgrade().map(TargetControl)
    }
}

impl<S: ControlledTarget> Drop for ControlInner<S> {
    fn drop(&mut self) {
        let subscription = sync::lock(&self.subscription).take();
        subscription.into_iter().for_each(|id| self.registry.unsubscribe(id));
    }
}

impl<S: ControlledTarget> Clone for TargetControl<S> {
    fn clone(&self) -> Self {
        TargetControl(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use bdev::malloc::{self, MallocConfig};

    use super::*;

    /// The devices that have changed.
    #[derive(Default)]
    struct Seen(Vec<String>);

    impl ControlledTarget for Seen {
        type Config = ();
        type Shared = &'static str;

        fn device_event(control: &TargetControl<Seen>, event: &DeviceEvent) {
            let Ok(mut state) = control.lock() else { return };
            state.0.push(format!("{} {}", control.shared(), event.device().name()));
        }
    }

    fn control() -> (Registry, TargetControl<Seen>) {
        let registry = Registry::new();
        for name in ["one", "two", "three"] {
            malloc::create(&registry, MallocConfig::new(name, 8, 512)).unwrap();
        }
        let control = TargetControl::new(registry.clone(), &[], "lost", Seen::default());
        (registry, control)
    }

    #[test]
    fn a_target_follows_its_devices_until_it_stops() {
        let (registry, control) = control();
        malloc::create(&registry, MallocConfig::new("four", 8, 512)).unwrap();
        registry.unregister("one").unwrap();
        assert_eq!(control.lock().unwrap().0, ["lost one"]);
        control.stop().0.push("stopped".into());
        registry.unregister("two").unwrap();
        assert_eq!(control.lock().err(), Some(TargetStopping));
        assert_eq!(control.lock_any().0, ["lost one", "stopped"]);
    }

    #[test]
    fn a_subscription_does_not_keep_the_target() {
        let (registry, control) = control();
        let (weak, other) = (control.downgrade(), control.clone());
        drop(control);
        assert!(weak.upgrade().is_some());
        drop(other);
        assert!(weak.upgrade().is_none());
        registry.unregister("one").unwrap();
    }

    #[test]
    fn a_key_is_assigned_again_only_when_no_core_has_its_device() {
        let (_, control) = control();
        let mut subscription = control.publisher().subscribe(0, || ());
        assert_eq!([control.assign_key(), control.assign_key()], [0, 1]);
        control.publisher().publish(Arc::default());
        control.retire_keys([0]);
        assert_eq!(control.assign_key(), 2, "a core may have a channel to the device");
        subscription.acknowledge(control.publisher().generation());
        assert_eq!(control.assign_key(), 0);
    }
}
