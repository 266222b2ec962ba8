//! The cost of the framework and of AES-XTS on this core: `accel_cost [ROUNDS]` prints the best and the
//! median of rounds of 1 MiB each, 400 without an argument. Compare with `openssl speed -evp aes-256-xts
//! -bytes 4096`.

use std::hint::black_box;
use std::time::Instant;

use accel::{Accel, Cipher, CryptoKey, TweakMode};

fn measure(what: &str, bytes: usize, rounds: usize, mut run: impl FnMut(u64)) {
    let count = ((1 << 20) / bytes).max(1) as u64;
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            (0..count).for_each(&mut run);
            start.elapsed().as_nanos() as f64 / count as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[rounds / 2]);
    let rate = bytes as f64 / best;
    println!("{what}: best {best:.0} ns ({rate:.2} GB/s), median {median:.0} ns");
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(400);
    let accel = Accel::default();
    let channel = accel.channel(0);
    let digits = |first: usize| (0..32).map(|at| format!("{:02x}", first + at)).collect::<String>();
    let (key, key2) = (digits(0), digits(100));
    for mode in [TweakMode::SimpleLba, TweakMode::Incr512FullLba] {
        let key = CryptoKey::from_hex("k", Cipher::AesXts, mode, key.as_bytes(), Some(key2.as_bytes()));
        let Ok(key) = key else { panic!("two keys of 32 bytes") };
        for bytes in [512, 4096, 131_072] {
            let (mut data, from) = (vec![7; bytes], vec![7; bytes]);
            let name = format!("AES-256-XTS {} {bytes} bytes", mode.name());
            measure(&format!("{name}, encrypt"), bytes, rounds, |lba| {
                _ = channel.encrypt(&key, black_box(&mut data), bytes, lba);
            });
            measure(&format!("{name}, encrypt a copy"), bytes, rounds, |lba| {
                key.encrypt_to(black_box(&mut data), black_box(&from), bytes, lba);
            });
            measure(&format!("{name}, decrypt"), bytes, rounds, |lba| {
                _ = channel.decrypt(&key, black_box(&mut data), bytes, lba);
            });
        }
    }
    let (mut to, from) = (vec![0; 4096], vec![7; 4096]);
    measure("copy 4096 bytes, by the framework", 4096, rounds, |_| {
        _ = channel.copy(black_box(&mut to), black_box(&from));
    });
    measure("copy 4096 bytes, without it", 4096, rounds, |_| {
        black_box(&mut to).copy_from_slice(black_box(&from));
    });
    measure("crc32c 4096 bytes", 4096, rounds, |_| _ = black_box(channel.crc32c(black_box(&from))));
    measure("xor 3 times 4096 bytes", 4096, rounds, |_| {
        _ = channel.xor(black_box(&mut to), &[black_box(&from), &from, &from]);
    });
}
