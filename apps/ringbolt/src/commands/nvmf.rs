//! `ringbolt nvmf`: set-up of a running NVMe target.

use std::fmt::Write;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use nvme_auth::TlsKey;
use serde_json::json;
use wire_nvme::fabrics::Nqn;

use super::rpc;
use crate::command_error::CommandError;
use crate::options::DEFAULT_SOCKET;

/// The subcommands of `ringbolt nvmf`.
#[derive(Subcommand)]
pub(crate) enum NvmfCommand {
    /// Allow a host to connect to a subsystem, and print what to type on the host
    #[command(after_help = "Example:\n  ringbolt nvmf add-host --tls --listen 192.0.2.1:4421 \\\n    \
        nqn.2026-11.io.ringbolt:a nqn.2014-08.org.nvmexpress:uuid:HOST")]
    AddHost(AddHostArgs),
}

#[derive(Args)]
pub(crate) struct AddHostArgs {
    /// NQN of the subsystem
    #[arg(value_parser = nqn)]
    subsystem: Nqn,
    /// NQN of the host, as in its /etc/nvme/hostnqn
    #[arg(value_parser = nqn)]
    host: Nqn,
    /// Make a key with which the host has to use TLS 1.3
    #[arg(long)]
    tls: bool,
    /// File for the key, which must not exist; it stays, as the target reads it when it starts
    #[arg(long, value_name = "FILE", requires = "tls")]
    key_file: Option<PathBuf>,
    /// Have the subsystem listen on this address too, with TLS if --tls is given
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// UNIX socket of the target's process
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    rpc_socket: PathBuf,
}

fn nqn(text: &str) -> Result<Nqn, String> {
    Nqn::new(text).map_err(|_| format!("'{text}' is not an NVMe qualified name"))
}

/// Folder of keys whose file is not given.
const KEYS: &str = "/etc/ringbolt/keys";

/// Runs a subcommand of `ringbolt nvmf`.
pub(crate) fn run(command: NvmfCommand) -> Result<(), CommandError> {
    match command {
        NvmfCommand::AddHost(options) => add_host(&options),
    }
}

fn add_host(options: &AddHostArgs) -> Result<(), CommandError> {
    let call = |method, params| rpc::call(&options.rpc_socket, method, params, rpc::QUERY_TIMEOUT);
    let (subsystem, host) = (options.subsystem.as_str(), options.host.as_str());
    // An unknown subsystem is reported before a key is made.
    call("nvmf_get_subsystems", json!({ "nqn": subsystem }))?;
    let key = match options.tls {
        true => Some(new_key(options)?),
        false => None,
    };
    let mut params = json!({ "nqn": subsystem, "host": host });
    if let Some(new) = &key {
        params["psk"] = json!(new.name);
        let file = json!({ "name": new.name, "path": new.file });
        call("keyring_file_add_key", file).inspect_err(|_| new.undo())?;
    }
    call("nvmf_subsystem_add_host", params).inspect_err(|_| {
        if let Some(new) = &key {
            let _ = call("keyring_file_remove_key", json!({ "name": new.name }));
            new.undo();
        }
    })?;
    if let Some(address) = options.listen {
        let adrfam = if address.is_ipv4() { "ipv4" } else { "ipv6" };
        let (traddr, trsvcid) = (address.ip().to_string(), address.port().to_string());
        let listen = json!({ "trtype": "TCP", "adrfam": adrfam, "traddr": traddr, "trsvcid": trsvcid });
        let params = json!({ "nqn": subsystem, "listen_address": listen, "secure_channel": options.tls });
        call("nvmf_subsystem_add_listener", params)?;
    }
    crate::console::stdout_line!("{}", instructions(options, key.as_ref()));
    Ok(())
}

/// A key that was made, in its file.
struct NewKey {
    name: String,
    file: PathBuf,
    key: TlsKey,
}

impl NewKey {
    fn undo(&self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

fn new_key(options: &AddHostArgs) -> Result<NewKey, CommandError> {
    let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '-', "_");
    let name = format!("{}+{}", plain(options.subsystem.as_str()), plain(options.host.as_str()));
    let file = match &options.key_file {
        Some(file) => std::path::absolute(file).map_err(CommandError::environment)?,
        None => {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(KEYS);
            made.map_err(|error| CommandError::environment(format!("{KEYS}: {error}; use --key-file")))?;
            Path::new(KEYS).join(format!("{name}.psk"))
        }
    };
    let key = TlsKey::generate().map_err(CommandError::environment)?;
    let written = key.to_text().write_new(&file);
    written.map_err(|error| CommandError::environment(format!("{}: {error}", file.display())))?;
    Ok(NewKey { name, file, key })
}

/// What to type on the host. It has the key: it is printed for this.
fn instructions(options: &AddHostArgs, key: Option<&NewKey>) -> String {
    let (subsystem, host) = (&options.subsystem, &options.host);
    let (address, port) = match options.listen {
        Some(address) => (address.ip().to_string(), address.port().to_string()),
        None => ("ADDRESS".to_string(), "PORT".to_string()),
    };
    let mut text = String::new();
    if let Some(new) = key {
        let _ = writeln!(text, "The key is in {}, as key {} of the keyring.", new.file.display(), new.name);
    }
    if options.listen.is_none() {
        let secure = if options.tls { " secure_channel=true" } else { "" };
        let socket = match options.rpc_socket == Path::new(DEFAULT_SOCKET) {
            true => String::new(),
            false => format!("-r {} ", options.rpc_socket.display()),
        };
        let _ = writeln!(
            text,
            "\nUnless the subsystem listens on such an address, here:\n  ringbolt rpc \
             {socket}nvmf_subsystem_add_listener nqn={subsystem}{secure} listen_address.trtype=TCP \
             listen_address.traddr=ADDRESS listen_address.trsvcid=PORT"
        );
    }
    let _ = write!(text, "\nOn the host, as root");
    let mut tls = "";
    if let Some(new) = key {
        let secret = new.key.to_text();
        let _ = write!(
            text,
            ", with nvme-cli 2.11 or later and with tlshd (package ktls-utils) running:\n  nvme check-tls-key \
             --insert --identity=1 --hostnqn={host} --subsysnqn={subsystem} --keydata='{}'",
            secret.reveal_text().unwrap_or_default(),
        );
        tls = " --tls";
    } else {
        let _ = write!(text, ":");
    }
    let _ =
        write!(text, "\n  nvme connect -t tcp -a {address} -s {port} -n {subsystem} --hostnqn={host}{tls}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_name_what_was_configured() {
        let args = |listen: Option<&str>, tls| AddHostArgs {
            subsystem: nqn("nqn.2026-11.io.ringbolt:a").unwrap(),
            host: nqn("nqn.2026-11.io.ringbolt:h").unwrap(),
            tls,
            key_file: None,
            listen: listen.map(|address| address.parse().unwrap()),
            rpc_socket: DEFAULT_SOCKET.into(),
        };
        let key = TlsKey::parse("NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:").unwrap();
        let new = NewKey { name: "one".into(), file: "/k".into(), key };
        let text = instructions(&args(Some("[::1]:4421"), true), Some(&new));
        for part in ["key one of", "/k,", "--keydata='NVMeTLSkey-1:01:", "-a ::1 -s 4421", "--tls"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = instructions(&args(None, false), None);
        assert!(text.contains("-a ADDRESS -s PORT") && !text.contains("tls"), "{text}");
        assert!(text.contains("ringbolt rpc nvmf_subsystem_add_listener nqn="), "{text}");
        let other = AddHostArgs { rpc_socket: "/run/o.sock".into(), ..args(None, false) };
        let text = instructions(&other, None);
        assert!(text.contains("ringbolt rpc -r /run/o.sock nvmf_subsystem_add_listener nqn="), "{text}");
    }
}
