//! Portal groups, initiator groups and authentication groups.

use std::net::SocketAddr;
use std::sync::Arc;

use sockets::StreamAddress;
use target_shell::TargetCores;

use super::{IscsiTarget, TargetState, check_count};
use crate::chap::{AuthGroup, AuthPolicy, ChapCredentials};
use crate::config::{ANY, InitiatorGroup, Netmask, Portal, PortalGroup, is_iscsi_name};
use crate::core::IscsiCore;
use crate::failure::IscsiTargetError;
use crate::limits::{GROUP_ENTRIES_MAX, OBJECTS_MAX, PORTALS_MAX, SECRET_BYTES_MAX};
use crate::settings::{InitiatorGroupConfig, PortalGroupConfig};

impl IscsiTarget {
    /// Creates a portal group and listens at its addresses. Returns them with the ports that the kernel assigned.
    ///
    /// # Errors
    /// The tag is in use, an address cannot be listened at, or a reactor does not respond; nothing has changed then.
    pub fn create_portal_group(
        &self,
        config: PortalGroupConfig,
    ) -> Result<Vec<SocketAddr>, IscsiTargetError> {
        let mut state = self.lock()?;
        if config.tag == 0 {
            return Err(IscsiTargetError::Invalid("tag: 0 is no tag of a portal group".into()));
        }
        if state.model.portal_groups.contains_key(&config.tag) {
            return Err(IscsiTargetError::Exists(format!("portal group {}", config.tag)));
        }
        check_count(state.model.portal_groups.len(), OBJECTS_MAX)?;
        check_count(config.portals.len().saturating_sub(1), PORTALS_MAX)?;
        state.model.check_policy(config.discovery_auth)?;
        let mut group = PortalGroup {
            tag: config.tag,
            private: config.private,
            discovery_auth: config.discovery_auth,
            addresses: config.portals.clone(),
            portals: Vec::new(),
        };
        let listens = if config.wait { Ok(()) } else { self.listen(&mut state, &config.portals, &mut group) };
        let result = listens.and_then(|()| {
            let group = Arc::new(group.clone());
            self.change_locked(&mut state, |model| {
                model.portal_groups.insert(group.tag, group);
                Ok(())
            })
        });
        if let Err(error) = result {
            state.unlisten(&group);
            return Err(error);
        }
        Ok(group.portals.iter().map(|portal| portal.address).collect())
    }

    /// Listens at the addresses of a portal group that was created with `wait`. One that listens is left as it is.
    ///
    /// # Errors
    /// There is no such group, an address cannot be listened at, or a reactor does not respond; nothing has changed then.
    pub fn start_portal_group(&self, tag: u16) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        let group = state.model.portal_groups.get(&tag).cloned();
        let mut group = Arc::unwrap_or_clone(group.ok_or_else(|| no_portal_group(tag))?);
        if !group.portals.is_empty() {
            return Ok(());
        }
        let addresses = group.addresses.clone();
        let result = self.listen(&mut state, &addresses, &mut group).and_then(|()| {
            let group = Arc::new(group.clone());
            self.change_locked(&mut state, |model| {
                model.portal_groups.insert(tag, group);
                Ok(())
            })
        });
        if result.is_err() {
            state.unlisten(&group);
        }
        result
    }

    /// Sets how initiators authenticate themselves for discovery: through a portal group, or through those that have no
    /// policy of their own.
    ///
    /// # Errors
    /// There is no such group, or a reactor does not respond; nothing has changed then.
    pub fn set_discovery_auth(&self, tag: Option<u16>, policy: AuthPolicy) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            model.check_policy(Some(policy))?;
            let Some(tag) = tag else {
                model.discovery_auth = policy;
                return Ok(());
            };
            let group = model.portal_groups.get_mut(&tag).ok_or_else(|| no_portal_group(tag))?;
            Arc::make_mut(group).discovery_auth = Some(policy);
            Ok(())
        })
    }

    /// How initiators authenticate themselves for discovery, unless a portal group has a policy of its own.
    pub fn discovery_auth(&self) -> AuthPolicy {
        self.lock_any().model.discovery_auth
    }

    /// Deletes a portal group: its listeners, its connections, and the maps of target nodes that name it.
    ///
    /// # Errors
    /// There is none, or a reactor does not respond; nothing has changed then.
    pub fn delete_portal_group(&self, tag: u16) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        let group = state.model.portal_groups.get(&tag).cloned();
        let group = group.ok_or_else(|| no_portal_group(tag))?;
        self.change_locked(&mut state, |model| {
            model.portal_groups.remove(&tag);
            model.retain_maps(|(portal_group, _)| *portal_group != tag);
            Ok(())
        })?;
        state.unlisten(&group);
        Ok(())
    }

    /// The portal groups by tag, with the ports that the kernel assigned.
    pub fn portal_groups(&self) -> Vec<PortalGroupConfig> {
        let state = self.lock_any();
        let groups = state.model.portal_groups.values().map(|group| PortalGroupConfig {
            tag: group.tag,
            portals: if group.portals.is_empty() {
                group.addresses.clone()
            } else {
                group.portals.iter().map(|portal| portal.address).collect()
            },
            private: group.private,
            wait: group.portals.is_empty(),
            discovery_auth: group.discovery_auth,
        });
        groups.collect()
    }

    /// Creates an initiator group.
    ///
    /// # Errors
    /// The tag is in use, an entry is invalid, or a reactor does not respond; nothing has changed then.
    pub fn create_initiator_group(&self, config: InitiatorGroupConfig) -> Result<(), IscsiTargetError> {
        let InitiatorGroupConfig { tag, initiators, netmasks } = config;
        let group = Arc::new(InitiatorGroup { tag, initiators, netmasks });
        self.change(|model| {
            if tag == 0 {
                return Err(IscsiTargetError::Invalid("tag: 0 is no tag of an initiator group".into()));
            }
            if model.initiator_groups.contains_key(&tag) {
                return Err(IscsiTargetError::Exists(format!("initiator group {tag}")));
            }
            check_count(model.initiator_groups.len(), OBJECTS_MAX)?;
            check_group(&group)?;
            model.initiator_groups.insert(tag, group);
            Ok(())
        })
    }

    /// Changes the entries of an initiator group. Sessions that exist go on.
    ///
    /// # Errors
    /// There is no such group, `change` fails, an entry is invalid, or a reactor does not respond; nothing has changed
    /// then.
    pub fn change_initiator_group(
        &self,
        tag: u32,
        change: impl FnOnce(&mut Vec<String>, &mut Vec<Netmask>) -> Result<(), IscsiTargetError>,
    ) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let group = model.initiator_groups.get_mut(&tag);
            let group = group.ok_or_else(|| IscsiTargetError::NotFound(format!("initiator group {tag}")))?;
            let group = Arc::make_mut(group);
            change(&mut group.initiators, &mut group.netmasks)?;
            check_group(group)
        })
    }

    /// Deletes an initiator group, and the maps of target nodes that name it. Sessions that exist go on.
    ///
    /// # Errors
    /// There is none, or a reactor does not respond; nothing has changed then.
    pub fn delete_initiator_group(&self, tag: u32) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let removed = model.initiator_groups.remove(&tag);
            removed.ok_or_else(|| IscsiTargetError::NotFound(format!("initiator group {tag}")))?;
            model.retain_maps(|(_, initiator_group)| *initiator_group != tag);
            Ok(())
        })
    }

    /// The initiator groups by tag.
    pub fn initiator_groups(&self) -> Vec<InitiatorGroupConfig> {
        let state = self.lock_any();
        let groups = state.model.initiator_groups.values().map(|group| InitiatorGroupConfig {
            tag: group.tag,
            initiators: group.initiators.clone(),
            netmasks: group.netmasks.clone(),
        });
        groups.collect()
    }

    /// Creates an authentication group.
    ///
    /// # Errors
    /// The tag is in use, a credential is invalid, or a reactor does not respond; nothing has changed then.
    pub fn create_auth_group(
        &self,
        tag: u32,
        credentials: Vec<ChapCredentials>,
    ) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            if tag == 0 {
                return Err(IscsiTargetError::Invalid("tag: 0 stands for no authentication group".into()));
            }
            if model.auth_groups.contains_key(&tag) {
                return Err(IscsiTargetError::Exists(format!("authentication group {tag}")));
            }
            check_count(model.auth_groups.len(), OBJECTS_MAX)?;
            check_credentials(&credentials)?;
            model.auth_groups.insert(tag, Arc::new(AuthGroup { tag, credentials }));
            Ok(())
        })
    }

    /// Changes the credentials of an authentication group. Sessions that exist go on.
    ///
    /// # Errors
    /// There is no such group, `change` fails, a credential is invalid, or a reactor does not respond; nothing has
    /// changed then.
    pub fn change_auth_group(
        &self,
        tag: u32,
        change: impl FnOnce(&mut Vec<ChapCredentials>) -> Result<(), IscsiTargetError>,
    ) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let group = Arc::make_mut(model.auth_groups.get_mut(&tag).ok_or_else(|| no_auth_group(tag))?);
            change(&mut group.credentials)?;
            check_credentials(&group.credentials)
        })
    }

    /// Deletes an authentication group. Initiators that have to authenticate by it cannot log in any more.
    ///
    /// # Errors
    /// There is none, or a reactor does not respond; nothing has changed then.
    pub fn delete_auth_group(&self, tag: u32) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            model.auth_groups.remove(&tag).ok_or_else(|| no_auth_group(tag))?;
            Ok(())
        })
    }

    /// The authentication groups by tag.
    pub fn auth_groups(&self) -> Vec<(u32, Vec<ChapCredentials>)> {
        let state = self.lock_any();
        state.model.auth_groups.values().map(|group| (group.tag, group.credentials.clone())).collect()
    }

    fn listen(
        &self,
        state: &mut TargetState,
        addresses: &[SocketAddr],
        group: &mut PortalGroup,
    ) -> Result<(), IscsiTargetError> {
        let TargetState { cores, last_portid, .. } = state;
        let cores = cores.get_or_start(|connections| {
            let limits = self.0.group_limits(connections);
            let sessions = self.0.shared().clone();
            let core = move |_: &reactor::Core, waker: &target_shell::GroupWaker| {
                IscsiCore::new(sessions.clone(), Some(waker.clone()))
            };
            TargetCores::start(self.0.reactors(), self.0.publisher(), limits, core)
        })?;
        for address in addresses {
            let portid = last_portid.wrapping_add(1).max(1);
            let bound = cores.listen(&StreamAddress::Tcp(*address), portid)?;
            *last_portid = portid;
            group.portals.push(Portal { portid, address: bound.tcp().unwrap_or(*address) });
        }
        Ok(())
    }
}

fn no_portal_group(tag: u16) -> IscsiTargetError {
    IscsiTargetError::NotFound(format!("portal group {tag}"))
}

fn no_auth_group(tag: u32) -> IscsiTargetError {
    IscsiTargetError::NotFound(format!("authentication group {tag}"))
}

fn check_group(group: &InitiatorGroup) -> Result<(), IscsiTargetError> {
    check_count(group.initiators.len().saturating_sub(1), GROUP_ENTRIES_MAX)?;
    check_count(group.netmasks.len().saturating_sub(1), GROUP_ENTRIES_MAX)?;
    let is_valid = |entry: &String| {
        let name = entry.strip_prefix('!').unwrap_or(entry);
        name == ANY || is_iscsi_name(name)
    };
    match group.initiators.iter().find(|entry| !is_valid(entry)) {
        Some(entry) => {
            Err(IscsiTargetError::Invalid(format!("initiators: {entry} is neither ANY nor an iSCSI name")))
        }
        None => Ok(()),
    }
}

/// User names are different, and texts are what a key's value may be.
fn check_credentials(credentials: &[ChapCredentials]) -> Result<(), IscsiTargetError> {
    check_count(credentials.len().saturating_sub(1), GROUP_ENTRIES_MAX)?;
    let invalid = |reason: String| Err(IscsiTargetError::Invalid(reason));
    let is_text =
        |text: &str| !text.is_empty() && text.len() <= SECRET_BYTES_MAX && !text.contains(char::is_control);
    for (index, one) in credentials.iter().enumerate() {
        if credentials[..index].iter().any(|other| other.user == one.user) {
            return Err(IscsiTargetError::Exists(format!("user {}", one.user)));
        }
        let mutual = one.mutual.iter().flat_map(|(user, secret)| [Some(user.as_str()), secret.reveal_text()]);
        let mut texts = [Some(one.user.as_str()), one.secret.reveal_text()].into_iter().chain(mutual);
        if !texts.all(|text| text.is_some_and(is_text)) {
            return invalid(format!("secrets: names and secrets have 1 to {SECRET_BYTES_MAX} characters"));
        }
        if one.mutual.as_ref().is_some_and(|(_, secret)| *secret == one.secret) {
            return invalid(format!("secrets: both secrets of {} are the same", one.user));
        }
    }
    Ok(())
}
