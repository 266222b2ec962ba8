//! Golden tests against SPDK and Linux.
//!
//! A C program printed the hexadecimal strings. It filled in the structures of SPDK's public
//! headers (`spdk/nvme_spec.h` and `spdk/nvmf_spec.h`, SPDK 26.09, on little-endian x86-64) field by
//! field. A sparse string gives `offset=bytes` for the non-zero parts.
#![allow(clippy::unwrap_used)]

#[path = "golden/commands.rs"]
mod commands;
#[path = "golden/structures.rs"]
mod structures;
#[path = "golden/tcp.rs"]
mod tcp;

use wire_nvme::Sqe;

fn hex<const N: usize>(text: &str) -> [u8; N] {
    assert_eq!(text.len(), 2 * N);
    std::array::from_fn(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap())
}

fn sparse<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for part in text.split_whitespace() {
        let (offset, part) = part.split_once('=').unwrap();
        let offset: usize = offset.parse().unwrap();
        for index in 0..part.len() / 2 {
            bytes[offset + index] = u8::from_str_radix(&part[2 * index..2 * index + 2], 16).unwrap();
        }
    }
    bytes
}

fn encoded<const N: usize>(encode: impl FnOnce(&mut [u8; N])) -> [u8; N] {
    // Encoding must overwrite the previous content of the buffer.
    let mut bytes = [0xa5; N];
    encode(&mut bytes);
    bytes
}

fn sqe(text: &str) -> Sqe {
    let bytes = hex(text);
    let sqe = Sqe::decode(&bytes);
    assert_eq!(sqe.to_bytes(), bytes);
    sqe
}
