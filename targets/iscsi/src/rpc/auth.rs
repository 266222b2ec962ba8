//! Authentication groups, and who has to authenticate.

use control::json::{Value, json};
use control::{Method, NoParameters, ParameterType, RpcError};
use secret::Secret;

use super::{INVALID, IscsiModule, UNRESPONSIVE};
use crate::{AuthPolicy, ChapCredentials, IscsiTargetError};

const NO_GROUP: (i64, &str) = (RpcError::ENODEV, "there is no such group");

pub(super) fn methods() -> Vec<Method<IscsiModule>> {
    vec![
        Method::update("iscsi_create_auth_group", create)
            .text("Creates a group of CHAP users and secrets, which target nodes refer to by the tag.", "true")
            .errors(&[
                INVALID,
                (RpcError::EEXIST, "there is a group with this tag, or a user is given twice"),
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_delete_auth_group", delete)
            .text(
                "Deletes an authentication group. Initiators that have to authenticate by it cannot log in any more.",
                "true",
            )
            .errors(&[NO_GROUP, UNRESPONSIVE]),
        Method::update("iscsi_auth_group_add_secret", add_secret)
            .text("Adds a user to an authentication group.", "true")
            .errors(&[INVALID, NO_GROUP, (RpcError::EEXIST, "the user exists"), UNRESPONSIVE]),
        Method::update("iscsi_auth_group_remove_secret", remove_secret)
            .text("Removes a user of an authentication group. Sessions that exist go on.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such group or user"), UNRESPONSIVE]),
        Method::query("iscsi_get_auth_groups", |module: &IscsiModule, _: NoParameters| {
            let groups = module.target.auth_groups();
            Ok::<_, RpcError>(groups.iter().map(|(tag, users)| describe(*tag, users, false)).collect::<Vec<_>>())
        })
        .text(
            "Lists the authentication groups. Unlike SPDK's it leaves the secrets out; `save_config` has them.",
            "array of groups with `tag` and `secrets`, which have `user` and `muser`",
        ),
        Method::update("iscsi_set_discovery_auth", set_discovery)
            .text("Sets how initiators authenticate themselves for discovery.", "true")
            .errors(&[INVALID, NO_GROUP, UNRESPONSIVE]),
        Method::update("iscsi_portal_group_set_auth", set_portal_group)
            .text(
                "Sets how initiators authenticate themselves for discovery through a portal group, instead of \
                 `iscsi_set_discovery_auth`.",
                "true",
            )
            .errors(&[INVALID, NO_GROUP, UNRESPONSIVE]),
        Method::update("iscsi_target_node_set_auth", set_node)
            .text("Sets how the initiators of a target node authenticate themselves.", "true")
            .errors(&[INVALID, (RpcError::ENODEV, "there is no such target node or group"), UNRESPONSIVE]),
    ]
}

control::parameters! {
    struct SecretParameters {
        /// User name of the initiator
        user: String,
        /// Its secret
        secret: Secret,
        /// User name of the target, for initiators that ask it to authenticate itself
        muser: Option<String>,
        /// Its secret
        msecret: Option<Secret>,
    }
}

control::parameters! {
    struct CreateGroup {
        /// Tag, from 1
        tag: u32,
        /// The users
        secrets: Vec<SecretParameters> = Vec::new(),
    }
}

control::parameters! {
    struct GroupTag {
        /// Tag of the authentication group
        tag: u32,
    }
}

control::parameters! {
    struct AddSecret {
        /// Tag of the authentication group
        tag: u32,
        /// User name of the initiator
        user: String,
        /// Its secret
        secret: Secret,
        /// User name of the target, for initiators that ask it to authenticate itself
        muser: Option<String>,
        /// Its secret
        msecret: Option<Secret>,
    }
}

control::parameters! {
    struct RemoveSecret {
        /// Tag of the authentication group
        tag: u32,
        /// User name of the initiator
        user: String,
    }
}

control::parameters! {
    struct DiscoveryAuth {
        /// No authentication, even if an initiator proposes it
        disable_chap: bool = false,
        /// Initiators have to authenticate
        require_chap: bool = false,
        /// They have to ask the target to authenticate itself; needs `require_chap`
        mutual_chap: bool = false,
        /// Tag of the authentication group; 0 is none
        chap_group: u32 = 0,
    }
}

control::parameters! {
    struct PortalGroupAuth {
        /// Tag of the portal group
        tag: u16,
        /// No authentication, even if an initiator proposes it
        disable_chap: bool = false,
        /// Initiators have to authenticate
        require_chap: bool = false,
        /// They have to ask the target to authenticate itself; needs `require_chap`
        mutual_chap: bool = false,
        /// Tag of the authentication group; 0 is none
        chap_group: u32 = 0,
    }
}

control::parameters! {
    struct NodeAuth {
        /// Name of the target node
        name: String,
        /// No authentication, even if an initiator proposes it
        disable_chap: bool = false,
        /// Initiators have to authenticate
        require_chap: bool = false,
        /// They have to ask the target to authenticate itself; needs `require_chap`
        mutual_chap: bool = false,
        /// Tag of the authentication group; 0 is none
        chap_group: u32 = 0,
    }
}

impl TryFrom<SecretParameters> for ChapCredentials {
    type Error = IscsiTargetError;

    fn try_from(params: SecretParameters) -> Result<ChapCredentials, IscsiTargetError> {
        let SecretParameters { user, secret, muser, msecret } = params;
        let mutual = match (muser, msecret) {
            (Some(user), Some(secret)) => Some((user, secret)),
            (None, None) => None,
            _ => return Err(IscsiTargetError::Invalid("muser and msecret belong together".into())),
        };
        Ok(ChapCredentials { user, secret, mutual })
    }
}

fn create(module: &IscsiModule, params: CreateGroup) -> Result<bool, RpcError> {
    let users: Result<Vec<_>, _> = params.secrets.into_iter().map(ChapCredentials::try_from).collect();
    module.target.create_auth_group(params.tag, users?)?;
    Ok(true)
}

fn delete(module: &IscsiModule, params: GroupTag) -> Result<bool, RpcError> {
    module.target.delete_auth_group(params.tag)?;
    Ok(true)
}

fn add_secret(module: &IscsiModule, params: AddSecret) -> Result<bool, RpcError> {
    let AddSecret { tag, user, secret, muser, msecret } = params;
    let new = ChapCredentials::try_from(SecretParameters { user, secret, muser, msecret })?;
    module.target.change_auth_group(tag, |users| {
        users.push(new);
        Ok(())
    })?;
    Ok(true)
}

fn remove_secret(module: &IscsiModule, params: RemoveSecret) -> Result<bool, RpcError> {
    module.target.change_auth_group(params.tag, |users| {
        let found = users.iter().position(|one| one.user == params.user);
        let found = found.ok_or_else(|| IscsiTargetError::NotFound(format!("user {}", params.user)))?;
        users.remove(found);
        Ok(())
    })?;
    Ok(true)
}

fn set_discovery(module: &IscsiModule, params: DiscoveryAuth) -> Result<bool, RpcError> {
    let DiscoveryAuth { disable_chap, require_chap, mutual_chap, chap_group } = params;
    let policy = policy(disable_chap, require_chap, mutual_chap, chap_group);
    module.target.set_discovery_auth(None, policy)?;
    Ok(true)
}

fn set_portal_group(module: &IscsiModule, params: PortalGroupAuth) -> Result<bool, RpcError> {
    let PortalGroupAuth { tag, disable_chap, require_chap, mutual_chap, chap_group } = params;
    let policy = policy(disable_chap, require_chap, mutual_chap, chap_group);
    module.target.set_discovery_auth(Some(tag), policy)?;
    Ok(true)
}

fn set_node(module: &IscsiModule, params: NodeAuth) -> Result<bool, RpcError> {
    let NodeAuth { name, disable_chap, require_chap, mutual_chap, chap_group } = params;
    let policy = policy(disable_chap, require_chap, mutual_chap, chap_group);
    module.target.set_node_auth(&name, policy)?;
    Ok(true)
}

/// The parameters of a policy, which several methods have.
pub(super) fn policy(disabled: bool, required: bool, mutual: bool, group: u32) -> AuthPolicy {
    AuthPolicy { disabled, required, mutual, group }
}

/// Adds a policy to the parameters of a method.
pub(super) fn add_policy(params: &mut Value, policy: AuthPolicy) {
    params["disable_chap"] = json!(policy.disabled);
    params["require_chap"] = json!(policy.required);
    params["mutual_chap"] = json!(policy.mutual);
    params["chap_group"] = json!(policy.group);
}

fn describe(tag: u32, users: &[ChapCredentials], with_secrets: bool) -> Value {
    let describe_user = |one: &ChapCredentials| {
        let mut value = json!({ "user": one.user });
        if with_secrets {
            value["secret"] = one.secret.encode();
        }
        if let Some((user, secret)) = &one.mutual {
            value["muser"] = json!(user);
            if with_secrets {
                value["msecret"] = secret.encode();
            }
        }
        value
    };
    json!({ "tag": tag, "secrets": users.iter().map(describe_user).collect::<Vec<_>>() })
}

/// The calls that come before those of portal groups.
pub(super) fn save(module: &IscsiModule) -> Vec<Value> {
    let groups = module.target.auth_groups();
    let call = |(tag, users): &(u32, Vec<ChapCredentials>)| json!({ "method": "iscsi_create_auth_group", "params": describe(*tag, users, true) });
    let mut calls: Vec<Value> = groups.iter().map(call).collect();
    let discovery = module.target.discovery_auth();
    if discovery != AuthPolicy::default() {
        let mut params = json!({});
        add_policy(&mut params, discovery);
        calls.push(json!({ "method": "iscsi_set_discovery_auth", "params": params }));
    }
    calls
}
