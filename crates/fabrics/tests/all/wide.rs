//! Tests of wide memory: accesses behave as on plain bytes, and words of 24 and 32 bytes change atomically.

pub(crate) mod hammer;

use farside_remote::draws::Draws;
use farside_remote::{Memory, Width};
use std::sync::atomic::Ordering;

#[test]
fn wide_words_never_tear_and_no_exchange_is_lost() {
    let outcome = hammer::hammer(4, 30_000, || {});
    println!("{outcome:?}");
    assert!(outcome.is_sound(), "{outcome:?}");
    assert!(outcome.failed.load(Ordering::Relaxed) > 0, "no exchange collided: the test tried nothing");
}

#[test]
fn every_access_behaves_as_on_plain_bytes() {
    const LEN: u64 = 1024;
    let memory = hammer::memory();
    let base = memory.geometry().segment_at(0);
    let mut random = Draws(1);
    let mut plain = vec![0u8; LEN as usize];
    let (mut swapped, mut failed) = (0, 0);
    for turn in 0..200_000 {
        let len = random.below(200);
        let offset = random.below(LEN - len);
        let range = offset as usize..(offset + len) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        match random.below(4) {
            0 => {
                let mut out = vec![0; len as usize];
                let Ok(()) = memory.read(base + offset, &mut out);
                assert_eq!(out, plain[range], "turn {turn}: READ of {len} bytes at {offset}");
            }
            1 => {
                let Ok(()) = memory.write(base + offset, &bytes);
                plain[range].copy_from_slice(&bytes);
            }
            2 => {
                let (width, len) = [(Width::W8, 8), (Width::W16, 16)][random.below(2) as usize];
                let at = len * random.below(LEN / len);
                let place = &mut plain[at as usize..(at + len) as usize];
                let mut held = [0; 16];
                held[..len as usize].copy_from_slice(place);
                let (held, new) = (u128::from_le_bytes(held), u128::from(random.next()));
                let Ok(loaded) = memory.load(base + at, width);
                assert_eq!(loaded, held, "turn {turn}: word of {len} bytes at {at}");
                let old = held ^ u128::from(random.below(2));
                let Ok(done) = memory.exchange(base + at, width, old, new);
                assert_eq!(done, if old == held { Ok(()) } else { Err(held) }, "turn {turn}");
                if old == held {
                    place.copy_from_slice(&new.to_le_bytes()[..len as usize]);
                }
            }
            _ => {
                let (at, len) = (32 * random.below(LEN / 32), 24 + 8 * random.below(2) as usize);
                let place = &mut plain[at as usize..][..len];
                let mut old = place.to_vec();
                let byte = random.below(len as u64) as usize;
                old[byte] ^= random.below(2) as u8;
                let (equal, new) = (old == place, [random.next() as u8; 32]);
                let Ok(done) = memory.exchange_wide(base + at, &mut old, &new[..len]);
                assert_eq!((done, &old[..]), (equal, &*place), "turn {turn}: wide word at {at}");
                if equal {
                    place.copy_from_slice(&new[..len]);
                }
                *(if equal { &mut swapped } else { &mut failed }) += 1;
            }
        }
    }
    let mut out = vec![0; LEN as usize];
    let Ok(()) = memory.beneath().read(base, &mut out);
    assert_eq!(out, plain);
    println!("{swapped} wide words swapped, {failed} not");
    assert!(swapped > 0 && failed > 0);
}
