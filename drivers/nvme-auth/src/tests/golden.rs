//! Responses that another implementation has computed: `golden.py` prints the table.

use wire_nvme::auth::{AuthBody, AuthMessage};

use super::*;

/// The hash function, that of the keys, the group, and SHA-256 of the host's response with the controller's
/// behind it.
const TABLE: &[(AuthHash, u8, DhGroup, &str)] = &[
    (AuthHash::Sha256, 0, DhGroup::Null, "1230da99445cd9d77d0fb747d42aed2c3bb211c544d7a578826454bff7876f72"),
    (
        AuthHash::Sha256,
        0,
        DhGroup::Ffdhe2048,
        "f5add16d777869a88ea3fd55edc56016282c193310227db0d1cbdf5d2945f9b4",
    ),
    (AuthHash::Sha256, 1, DhGroup::Null, "517166a0b9dc65dc889043adccaca0e3fe350fcc862c035466cadd5adb9210c5"),
    (
        AuthHash::Sha256,
        1,
        DhGroup::Ffdhe2048,
        "ac1ef7ee9eddf04a68c1618ef69232f4615f114c6783c7ac081a28d6c5af76e0",
    ),
    (
        AuthHash::Sha256,
        1,
        DhGroup::Ffdhe3072,
        "2bdadfd630ac1b7f7dad2d489aba82e4937936b17f1a68423f76f1fc52419977",
    ),
    (
        AuthHash::Sha256,
        1,
        DhGroup::Ffdhe4096,
        "3eec256e4bb88f8a340592e6b255c6af557c87f13668d835b6b30f6152b3014f",
    ),
    (
        AuthHash::Sha256,
        1,
        DhGroup::Ffdhe6144,
        "8f0fd62917f55774e36b88862e108bcd29fd3fe1684f53944469046dd957fe3e",
    ),
    (
        AuthHash::Sha256,
        1,
        DhGroup::Ffdhe8192,
        "b64de4ecc28d2c0b5d4434c1a61bd67c7ab8230105250524fb6fb2080ab697e6",
    ),
    (AuthHash::Sha256, 2, DhGroup::Null, "69f400e1ac1d7c48a5b2d3a54bcb338aa7e7ee11808a6168ea755c2fc92ed457"),
    (
        AuthHash::Sha256,
        2,
        DhGroup::Ffdhe2048,
        "326414351a2a3a0650cddad24db67985f86916eee139715a87160c6d1ea1aeb8",
    ),
    (AuthHash::Sha256, 3, DhGroup::Null, "8bc83296c62634e7f7242f2e85bcd9096bdd2306480c9d423aaf9a6569aa6f20"),
    (
        AuthHash::Sha256,
        3,
        DhGroup::Ffdhe2048,
        "831e1238671b8023caf29080537edab398591da2df8bc806425674ec01e7f641",
    ),
    (AuthHash::Sha384, 0, DhGroup::Null, "5c842ff7fd513aa0b175f0b5049eb9fa36681144bd915efc92d3933b62ae86a3"),
    (
        AuthHash::Sha384,
        0,
        DhGroup::Ffdhe2048,
        "6777329a63a5f4d4a102fe47d9f69fa41d9bc6ecd6e300098f98f0735a68d07e",
    ),
    (AuthHash::Sha384, 1, DhGroup::Null, "f7fa907b248986390f029024aa5c790e4236ba84d126f64a7da8e13c032200fc"),
    (
        AuthHash::Sha384,
        1,
        DhGroup::Ffdhe2048,
        "bd0ea51474713d057a809894ff66e553d044bac2b3797b1a496feda0759d4c73",
    ),
    (
        AuthHash::Sha384,
        1,
        DhGroup::Ffdhe3072,
        "d05434bd34a36ff502a0d6938047b810f64bdce465639acaa52205c733f2ded7",
    ),
    (
        AuthHash::Sha384,
        1,
        DhGroup::Ffdhe4096,
        "5f62b9eea23a43c1c16614fb1d3b659c95ede30d4aea9d03c02a78c17c7ab0f4",
    ),
    (
        AuthHash::Sha384,
        1,
        DhGroup::Ffdhe6144,
        "a4e749a883174c3ee129f7ddd8a2f17f8dc6eec1b1de1e8b2a1a657a3acfc90a",
    ),
    (
        AuthHash::Sha384,
        1,
        DhGroup::Ffdhe8192,
        "8f4261b74bd97ab9ca7cdb13f415b093eba1861834a3a5971c7dbcc1fa196bb8",
    ),
    (AuthHash::Sha384, 2, DhGroup::Null, "6d01dddc605d2298dd973dd9e439353e4ec9c5f2c30c868992b5874b836df9b3"),
    (
        AuthHash::Sha384,
        2,
        DhGroup::Ffdhe2048,
        "121c957ee9367ca058f1e49527f04c37c515ab768343d442fb04797930548e75",
    ),
    (AuthHash::Sha384, 3, DhGroup::Null, "44d0389ab26c8d529c95104b12a70fe1d92e4490213c02cca250969ad2c5c7ce"),
    (
        AuthHash::Sha384,
        3,
        DhGroup::Ffdhe2048,
        "d8fba3c52b0e959a23db974ca57f37e3833007153c3f7c0057c55b1bbaf9f64e",
    ),
    (AuthHash::Sha512, 0, DhGroup::Null, "aa158ad1bc94fd084972c488af1919bed260a7adc13e96ae6495162e5b55161f"),
    (
        AuthHash::Sha512,
        0,
        DhGroup::Ffdhe2048,
        "bebefdf03540985d102d92b1b4c76818a2f470a7325247af84a836c239c845ce",
    ),
    (AuthHash::Sha512, 1, DhGroup::Null, "65cb62068f536975cb3fe0de56179dfd7b9d04300ff3c6e6d3ea01707a643dd5"),
    (
        AuthHash::Sha512,
        1,
        DhGroup::Ffdhe2048,
        "60d1c626459923c02884a87825f82a6ee6c4daf2e16f07cc71dff2543cd3a438",
    ),
    (
        AuthHash::Sha512,
        1,
        DhGroup::Ffdhe3072,
        "87bb7a7854f2a55493c184d3e5de0630d925a31596e62b55e0f78ca8d758a748",
    ),
    (
        AuthHash::Sha512,
        1,
        DhGroup::Ffdhe4096,
        "55dc24ffbc841869b23e10bfb781707259093835ebbdea181d66df2c5d712124",
    ),
    (
        AuthHash::Sha512,
        1,
        DhGroup::Ffdhe6144,
        "19e28f988a9b49c6d5390394736b38f4e4d171f0f13a903c4f40175f039f1d2e",
    ),
    (
        AuthHash::Sha512,
        1,
        DhGroup::Ffdhe8192,
        "c375feaab85ad61dbd98253a7d9146ee5b0790fee1579054582af28411d136a6",
    ),
    (AuthHash::Sha512, 2, DhGroup::Null, "a401c16558bfa0a9aedc06437d0ca7ea514792a8a2cd6007e17f70538f55885a"),
    (
        AuthHash::Sha512,
        2,
        DhGroup::Ffdhe2048,
        "e01d4571def3649e40f4f4e4dad2bc623108ef151b8179623dafafba1f22fa61",
    ),
    (AuthHash::Sha512, 3, DhGroup::Null, "3cedf1917c013f77d1479a9e011a72dd6d349dfb07a49f676847bf39d6af79cd"),
    (
        AuthHash::Sha512,
        3,
        DhGroup::Ffdhe2048,
        "e13e21c75e497daceb5dab7886b8b93863f065dae377767465e65d1c22181e6f",
    ),
];

/// Bytes that ascend from the number of the call, and sequence numbers from 1.
#[derive(Default)]
pub(super) struct Counted {
    fills: u8,
    sequences: u32,
}

impl Nonces for Counted {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandomness> {
        self.fills += 1;
        bytes.copy_from_slice(&ascending(self.fills, bytes.len()));
        Ok(())
    }

    fn sequence(&mut self) -> Result<u32, NoRandomness> {
        self.sequences += 1;
        Ok(self.sequences)
    }
}

fn ascending(first: u8, count: usize) -> Vec<u8> {
    (0..count).map(|index| first.wrapping_add(index as u8)).collect()
}

#[test]
fn responses_are_those_of_another_implementation() {
    for (hash, kind, group, expected) in TABLE {
        let of_key = AuthHash::from_wire(*kind);
        let length = of_key.map_or(32, AuthHash::bytes);
        let key = |first| AuthKey::new(of_key, &ascending(first, length)).unwrap();
        let keys = AuthKeys { host: key(7), controller: Some(key(99)) };
        let options = AuthOptions { hashes: vec![*hash], groups: vec![*group] };
        let (mut nonces, parties) = (Counted::default(), parties());
        let mut controller = ControllerAuth::new(keys.clone(), parties.clone(), options.clone());
        let (mut host, negotiate) = HostAuth::new(keys, parties, &options, 0x1234);
        controller.sent(&negotiate, &mut nonces);
        let HostAction::Send(reply) = host.receive(&received(&mut controller), &mut nonces) else { panic!() };
        controller.sent(&reply, &mut nonces);
        let success = received(&mut controller);
        let AuthBody::Reply(one) = AuthMessage::decode(&reply).unwrap().body else { panic!() };
        let AuthBody::Success1(_, Some(two)) = AuthMessage::decode(&success).unwrap().body else { panic!() };
        let both = crate::hash::digest(AuthHash::Sha256, &[one.response, two].concat());
        let both: String = both.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(both, *expected, "{hash:?}, keys of {of_key:?}, {group:?}");
        assert!(matches!(host.receive(&success, &mut nonces), HostAction::SendLast(_)));
    }
}

#[test]
fn keys_have_the_representation_of_another_implementation() {
    for (hash, length, text) in [
        (Some(AuthHash::Sha256), 32, "DHHC-1:01:BwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSYDWRHm:"),
        (None, 48, "DHHC-1:00:BwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSYnKCkqKywtLi8wMTIzNDU28z7wqg==:"),
        (
            Some(AuthHash::Sha512),
            64,
            "DHHC-1:03:BwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSYnKCkqKywtLi8wMTIzNDU2Nzg5Ojs8PT4/QEFCQ0RFRsueZT4=:",
        ),
    ] {
        let key = AuthKey::new(hash, &ascending(7, length)).unwrap();
        assert_eq!(AuthKey::parse(text), Ok(key.clone()));
        assert_eq!(AuthKey::parse(&format!("{text}\n")), Ok(key.clone()));
        assert_eq!(key.to_text().reveal_text(), Some(text));
    }
}
