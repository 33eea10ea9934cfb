//! Tests of the bytes of a node: every tear is detected, and no bytes cause a panic.

use super::layout::{Far, Spec};
use super::node::{Entry, Form, Image};
use crate::index::Keys;
use farside_remote::draws::Draws;

fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for (line, version_bits) in [(16, 16), (16, 4), (16, 8), (64, 4), (64, 8), (64, 16)] {
        for (keys, key_max, value_max) in
            [(Keys::Numbers, 8, 8), (Keys::Numbers, 8, 100), (Keys::Strings, 20, 300)]
        {
            let spec = Spec { keys, key_max, value_max, span: 8, line, version_bits, ..Spec::default() };
            assert_eq!(spec.check(), Ok(()));
            forms.push(spec.form());
        }
    }
    forms
}

fn bytes_of(form: &Form, image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    image.encode(form, &mut bytes);
    bytes
}

fn leaf(form: &Form) -> Image {
    let mut image = Image::default();
    image.begin(form, 0, (b"", Some(b"~")), Some(Far::new(0, 64)));
    for index in 0..form.span() {
        image.set_entry(form, index, &[b'a' + index as u8; 8], &[index as u8; 8]);
    }
    image
}

/// Key and value of an entry, both empty if it has none; `None` if it is torn.
type Found = Option<(Vec<u8>, Vec<u8>)>;

/// All entries of a leaf that was read; `None` if the READ has met a change of the whole node.
fn entries(form: &Form, bytes: &[u8]) -> Option<Vec<Found>> {
    let mut image = Image::default();
    if !image.decode(form, 0, bytes).expect("sound bytes") {
        return None;
    }
    let entry = |index| match image.entry(form, index).expect("sound bytes") {
        Entry::Used { key, value } => Some((key.to_vec(), value.to_vec())),
        Entry::Empty => Some((Vec::new(), Vec::new())),
        Entry::Torn => None,
    };
    Some((0..form.span()).map(entry).collect())
}

/// Bytes of which each line is old or new.
fn mixed(line: usize, old: &[u8], new: &[u8], draws: &mut Draws) -> Vec<u8> {
    old.chunks(line).zip(new.chunks(line)).flat_map(|(old, new)| draws.pick(&[old, new]).to_vec()).collect()
}

#[test]
fn a_node_is_decoded_as_it_was_encoded() {
    for form in forms() {
        let image = leaf(&form);
        let bytes = bytes_of(&form, &image);
        assert_eq!(bytes.len(), form.len(true));
        let mut decoded = Image::default();
        assert_eq!(decoded.decode(&form, 0, &bytes), Ok(true));
        assert_eq!((decoded.low(), decoded.high(&form)), (&b""[..], Some(&b"~"[..])));
        for index in 0..form.span() {
            let used = Entry::Used { key: &[b'a' + index as u8; 8], value: &[index as u8; 8] };
            assert_eq!(decoded.entry(&form, index), Ok(used));
        }
        assert_eq!(bytes_of(&form, &decoded), bytes);
    }
}

/// Whether each mixture of a node's bytes before and after a change is found to be torn, or has each entry as it was
/// before or after.
fn tears_are_detected(change: impl Fn(&Form, &mut Image), draws: &mut Draws) -> bool {
    forms().into_iter().all(|form| {
        let (old, mut image) = (leaf(&form), leaf(&form));
        change(&form, &mut image);
        let (old, new) = (bytes_of(&form, &old), bytes_of(&form, &image));
        let [before, after] = [&old, &new].map(|bytes| entries(&form, bytes).expect("a whole node"));
        (0..200).all(|_| {
            let bytes = mixed(form.line, &old, &new, draws);
            let Some(found) = entries(&form, &bytes) else { return true };
            let is_sound = |index: usize| {
                found[index].is_none() || found[index] == before[index] || found[index] == after[index]
            };
            (0..form.span()).all(is_sound)
        })
    })
}

fn change_entries(form: &Form, image: &mut Image) {
    for index in [1, 2, 6] {
        image.set_entry(form, index, &[b'z'; 8], &[99; 8]);
    }
}

fn change_node(form: &Form, image: &mut Image) {
    image.shrink(form, b"m", Far::new(0, 128));
    let entries: Vec<_> = (0..4).map(|index| (vec![b'A' + index; 8], vec![index; 8])).collect();
    image.fill_all(form, &entries);
    image.raise(form);
}

#[test]
fn tears_of_entries_and_of_nodes_are_detected() {
    let mut draws = Draws(3);
    assert!(tears_are_detected(change_entries, &mut draws));
    assert!(tears_are_detected(change_node, &mut draws));
    #[cfg(farside_mutants)]
    {
        use farside_remote::mutant::Mutant;
        Mutant::switch(Some(super::mutants::PUBLISHED_VERSIONS));
        let lives = [change_entries as fn(&Form, &mut Image), change_node]
            .map(|change| tears_are_detected(change, &mut draws));
        Mutant::switch(None);
        assert_eq!(lives, [false, false], "the mutant lives");
    }
}

#[test]
fn a_change_of_an_entry_writes_no_more_than_its_range() {
    for form in forms() {
        for index in 0..form.span() {
            let (mut image, old) = (leaf(&form), bytes_of(&form, &leaf(&form)));
            image.set_entry(&form, index, b"zzzzzzzz", b"");
            let new = bytes_of(&form, &image);
            let range = form.range(index);
            assert!(range.start.is_multiple_of(16) && range.end.is_multiple_of(16) && range.end <= new.len());
            for (at, (old, new)) in old.iter().zip(&new).enumerate() {
                assert!(old == new || range.contains(&at), "byte {at} of {range:?}");
            }
        }
    }
}

#[test]
fn as_many_changes_as_wrap_a_version_take_as_long_as_a_late_read() {
    for form in forms() {
        let mut image = leaf(&form);
        let old = bytes_of(&form, &image);
        let wrap = form.read_max().as_nanos() / if form.line == 64 { 500 } else { 100 };
        for change in 1..=wrap {
            image.set_entry(&form, 3, b"zzzzzzzz", &change.to_le_bytes()[..8]);
        }
        let new = bytes_of(&form, &image);
        // The versions are equal again, so versions alone do not detect a tear. One change less, and they do.
        let mut draws = Draws(8);
        let all_whole = |new: &[u8], draws: &mut Draws| {
            (0..50).all(|_| {
                let bytes = mixed(form.line, &old, new, draws);
                entries(&form, &bytes).is_none_or(|entries| entries.iter().all(Option::is_some))
            })
        };
        assert!(all_whole(&new, &mut draws));
    }
}

#[test]
fn any_bytes_are_a_node_or_none() {
    let mut draws = Draws(5);
    for form in forms() {
        for level in [0, 1, 2] {
            let len = form.len(level == 0);
            for _ in 0..50 {
                let mut bytes = draws.bytes(len);
                if draws.once_in(2) {
                    // Tags of one version, so that the rest is looked at.
                    let line = form.line;
                    let tag = bytes[..4].to_vec();
                    bytes.chunks_mut(line).for_each(|line| line[..4].copy_from_slice(&tag));
                }
                let mut image = Image::default();
                if image.decode(&form, level, &bytes) == Ok(true) && level == 0 {
                    for index in 0..form.span() {
                        let _any = image.entry(&form, index);
                    }
                }
            }
            assert!(Image::default().decode(&form, level, &[]).is_err());
        }
    }
}
