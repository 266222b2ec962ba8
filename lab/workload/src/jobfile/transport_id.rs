//! `filename` as SPDK's fio plugin reads it: transport identifiers such as `trtype=PCIe traddr=0000.04.00.0
//! ns=1`.

/// The URIs of transport identifiers, which are separated by colons; `None` if the text has none. As a colon
/// separates files in fio, addresses have points in their place, and NQNs and IPv6 addresses escape theirs.
pub(super) fn uris(text: &str) -> Result<Option<Vec<String>>, String> {
    if !begins(text) {
        return Ok(None);
    }
    let mut names: Vec<String> = Vec::new();
    let mut escaped = false;
    for piece in text.split(':') {
        let (plain, ends_escaped) = match piece.strip_suffix('\\') {
            Some(plain) => (plain, true),
            None => (piece, false),
        };
        match names.last_mut() {
            Some(last) if escaped || !begins(plain) => {
                last.push(':');
                last.push_str(plain);
            }
            _ => names.push(plain.to_string()),
        }
        escaped = ends_escaped;
    }
    names.iter().map(|name| uri(name)).collect::<Result<Vec<String>, String>>().map(Some)
}

/// Whether a text begins with the word `trtype`, and not with the name of a file that begins so.
fn begins(text: &str) -> bool {
    let rest = text.trim_start().strip_prefix("trtype");
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['=', ':', ' ']))
}

fn uri(text: &str) -> Result<String, String> {
    let (mut transport, mut address, mut port, mut subnqn, mut nsid) = ("", "", "4420", None, "1");
    for word in text.split_whitespace() {
        let (key, value) =
            word.split_once(['=', ':']).ok_or_else(|| format!("--filename: {word} has no value"))?;
        match key.to_ascii_lowercase().as_str() {
            "trtype" => transport = value,
            "traddr" => address = value,
            "trsvcid" => port = value,
            "subnqn" => subnqn = Some(value),
            "ns" => nsid = value,
            "adrfam" => {}
            other => {
                return Err(format!(
                    "--filename: {other} is none of trtype, traddr, trsvcid, subnqn, ns, adrfam"
                ));
            }
        }
    }
    if address.is_empty() {
        return Err(format!("--filename={text} names no traddr"));
    }
    match transport.to_ascii_lowercase().as_str() {
        // 0000.04.00.0 and 0000:04:00.0 are the same function; the domain may be left out.
        "pcie" => {
            let (device, function) = address.rsplit_once('.').unwrap_or((address, "0"));
            Ok(format!("nvme+pcie://{}.{function}?ns={nsid}", device.replace('.', ":")))
        }
        fabric @ ("tcp" | "rdma") => {
            let needed =
                || format!("--filename: trtype={transport} needs subnqn=NQN, with each : written \\:");
            let subnqn = subnqn.ok_or_else(needed)?;
            let host = if address.contains(':') { format!("[{address}]") } else { address.to_string() };
            Ok(format!("nvme+{fabric}://{host}:{port}/{subnqn}?ns={nsid}"))
        }
        "vfiouser" => Ok(format!("nvme+vfio-user:{address}?ns={nsid}")),
        other => Err(format!("--filename: trtype={other}: it is PCIe, TCP, RDMA or VFIOUSER")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_identifiers_become_uris() {
        let cases = [
            ("trtype=PCIe traddr=0000.04.00.0 ns=1", "nvme+pcie://0000:04:00.0?ns=1"),
            ("trtype=PCIe traddr=0000\\:04\\:00.0 ns=1", "nvme+pcie://0000:04:00.0?ns=1"),
            ("trtype=PCIe traddr=04.00.1", "nvme+pcie://04:00.1?ns=1"),
            (
                "trtype=TCP adrfam=IPv4 traddr=10.0.0.1 trsvcid=4421 subnqn=nqn.2016-06.io.spdk\\:a ns=2",
                "nvme+tcp://10.0.0.1:4421/nqn.2016-06.io.spdk:a?ns=2",
            ),
            (
                "trtype=RDMA traddr=fe80\\:\\:1 subnqn=nqn.2016-06.io\\:a",
                "nvme+rdma://[fe80::1]:4420/nqn.2016-06.io:a?ns=1",
            ),
            ("trtype=vfiouser traddr=/run/a", "nvme+vfio-user:/run/a?ns=1"),
        ];
        for (text, uri) in cases {
            assert_eq!(uris(text).unwrap().unwrap(), [uri], "{text}");
        }
        let two = "trtype=PCIe traddr=0000.04.00.0 ns=1:trtype=PCIe traddr=0000.05.00.0 ns=1";
        assert_eq!(uris(two).unwrap().unwrap().len(), 2);
        for files in ["/dev/sda:/dev/sdb", "trtype-1.img", "trtypes"] {
            assert_eq!(uris(files).unwrap(), None, "{files}");
        }
        for wrong in [
            "trtype=PCIe",
            "trtype=RDMA traddr=a",
            "trtype=TCP traddr=a",
            "trtype=PCIe traddr=a x=1",
            "trtype",
        ] {
            assert!(uris(wrong).is_err(), "{wrong}");
        }
    }
}
