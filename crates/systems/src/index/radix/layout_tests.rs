//! Tests of the bytes: what is encoded is decoded, and any bytes are either decoded or damaged.

use super::layout::*;
use crate::index::Keys;
use crate::lease::{ClientId, LockWord};
use farside_remote::draws::Draws;
use farside_remote::service::Extent;
use farside_remote::{Key, NodeId};

fn layout(keys: Keys) -> Layout {
    let spec = Spec { keys, value_max: 40, chunk: 1 << 14, ids: 4, lanes: 2, ..Spec::default() };
    let extent = |at| Extent { key: Key::new(1, 1), at, len: 1 << 18 };
    let members = [(NodeId(0), extent(1 << 20)), (NodeId(1), extent(1 << 21))];
    Layout::new(&serde_json::to_string(&spec).expect("plain data"), &members).expect("it is possible")
}

#[test]
fn a_slot_is_decoded_as_it_was_encoded() {
    let layout = layout(Keys::Strings);
    let class = layout.spec.leaf_class(20);
    for member in 0..2 {
        for number in [0, layout.members[member].pieces - 1] {
            let chunk = Chunk { member, number };
            let leaf = layout.unit(chunk, class, layout.units(class) - 1);
            let slot = layout.leaf_slot(200, leaf, class, 0x1234_5678);
            let generation = 0x1234_5678 & (GENERATIONS as u32 - 1);
            assert_eq!(layout.view(slot), Ok(View::Leaf { at: leaf, class, generation }));
            assert_eq!(layout.unit_at(leaf, class), Some((chunk, layout.units(class) - 1)));
            let node = layout.unit(chunk, Class::NODE, 0);
            let slot = layout.node_slot(0, node, NodeType::SMALLEST).with_type(NodeType::MAX).with_partial(7);
            assert_eq!(layout.view(slot), Ok(View::Node { at: node, kind: NodeType::MAX, generation: 0 }));
            assert_eq!(slot.partial(), 7);
        }
    }
    assert_eq!(layout.view(Slot::NULL), Ok(View::Null));
    assert_eq!(layout.view(Slot::empty(9)), Ok(View::Empty));
}

#[test]
fn units_of_a_chunk_lie_beside_each_other_and_beside_their_states() {
    let layout = layout(Keys::Numbers);
    let chunk_len = u64::from(layout.spec.chunk);
    for class in (1..=100).map(Class).chain([Class::NODE]) {
        let (units, first) = class.units(chunk_len);
        assert!(units > 0 && first >= units * 8 && first + units * class.size() <= chunk_len, "{class:?}");
    }
    let parts = [layout.root(), layout.hint(0), layout.claim(Chunk { member: 0, number: 0 })];
    assert!(parts.windows(2).all(|pair| pair[0].offset() < pair[1].offset()));
    let last = Chunk { member: 0, number: layout.members[0].pieces - 1 };
    assert!(layout.claim(last).plus(8).offset() <= layout.state(Chunk { member: 0, number: 0 }, 0).offset());
    assert!(layout.addr(layout.state(last, 0), chunk_len).is_ok());
}

#[test]
fn types_grow_from_4_to_256_slots() {
    let slots: Vec<usize> = (1..=7).map(|kind| NodeType(kind).slots()).collect();
    assert_eq!(slots, [4, 8, 16, 32, 64, 128, 256]);
    assert_eq!([3, 4, 255].map(NodeType::for_slot), [NodeType(1), NodeType(2), NodeType(7)]);
    assert_eq!(NodeType::MAX.read_len(), 2064);
}

#[test]
fn a_header_keeps_its_branch_when_it_is_moved_down() {
    let header = Header::new(3, NodeType(4), b"abcde");
    assert_eq!(Header::of(header.word()), Ok(header));
    assert_eq!((header.branch(), header.prefix_from(5)), (8, Some(&b"cde"[..])));
    let below = header.below(5).expect("it is in the prefix");
    assert_eq!((below.branch(), below.prefix(), below.kind), (8, &b"cde"[..], NodeType(4)));
    assert_eq!((header.prefix_from(2), header.prefix_from(9)), (None, None));
    assert_eq!(header.word() & TYPE_MASK, 4 << 8);
}

#[test]
fn a_leaf_with_any_changed_byte_is_not_whole() {
    let layout = layout(Keys::Strings);
    let spec = &layout.spec;
    let (path, value) = (&b"key\0"[..], &[7; 33][..]);
    let class = spec.leaf_class(path.len());
    let mut bytes = Vec::new();
    let lock = LockWord::new(ClientId::new(3).expect("not 0"), 5).expect("few bits");
    leaf_bytes(class, (99, 5), (path, Content::Value(value)), lock, &mut bytes);
    assert_eq!(bytes.len() as u64, class.size());
    let whole = |bytes: &[u8]| match leaf_of(spec, 5, bytes) {
        Ok(Leaf::Whole(leaf)) => Some((leaf.path.to_vec(), leaf.value.to_vec(), leaf.head.is_dead())),
        _ => None,
    };
    assert_eq!(whole(&bytes), Some((path.to_vec(), value.to_vec(), false)));
    assert_eq!(value_of(&bytes), value);
    for at in HEAD_AT as usize..24 + path.len() + value.len() {
        let mut torn = bytes.clone();
        torn[at] ^= 1;
        // The dead bit is not covered by the checksum, but is not the lowest bit of its byte.
        assert_eq!(whole(&torn), None, "byte {at} differs");
    }
    let mut other = bytes.clone();
    other[..8].fill(1);
    let lock_at = lock_at(class) as usize;
    other[lock_at..].fill(0);
    assert_eq!(whole(&other), whole(&bytes), "neither the reverse pointer nor the lock is covered");
    let dead = head_of(&bytes).expect("it is long enough").1.dead().0;
    other[8..16].copy_from_slice(&dead.to_le_bytes());
    assert_eq!(whole(&other), Some((path.to_vec(), value.to_vec(), true)));
    assert!(matches!(leaf_of(spec, 6, &bytes), Ok(Leaf::Reused)));
    assert!(matches!(leaf_of(spec, 5 + GENERATIONS as u32, &bytes), Ok(Leaf::Whole(_))));
}

#[test]
fn any_bytes_are_decoded_or_damaged() {
    let mut draws = Draws(7);
    for keys in [Keys::Numbers, Keys::Strings] {
        let layout = layout(keys);
        for _ in 0..20_000 {
            let mut word = draws.next();
            // Small numbers are more often valid.
            word &= draws.next() | draws.next() << 40;
            if let Ok(View::Leaf { at, class, .. }) = layout.view(Slot(word)) {
                assert!(layout.addr(at, class.size()).is_ok());
            }
            if let Ok(View::Node { at, kind, .. }) = layout.view(Slot(word)) {
                assert!(layout.addr(at, kind.read_len().into()).is_ok());
            }
            if let Ok(header) = Header::of(word) {
                assert!(header.branch() <= 255 + 6);
                _ = (header.prefix_from(draws.below(300) as usize), header.below(draws.below(256) as usize));
            }
            _ = Claim::of(word);
            _ = layout.unit_of_object(1, word, draws.below(1 << 14));
            let len = draws.below(300) as usize;
            let mut bytes = draws.bytes(len);
            if let Some(at) = bytes.get_mut(8..16) {
                at.copy_from_slice(&(word & 0x03ff_ffff_ffff_ffff).to_le_bytes());
            }
            _ = leaf_of(&layout.spec, word as u32, &bytes);
            _ = NodeView::of(&bytes).and_then(|node| node.header());
            _ = (value_of_any(&bytes), path_and_value(&bytes));
        }
    }
}

/// The value of bytes that may be too short for a leaf.
fn value_of_any(bytes: &[u8]) -> Option<&[u8]> {
    head_of(bytes).map(|_| value_of(bytes))
}

#[test]
fn a_pointer_is_decoded_as_it_was_encoded_and_is_to_its_value_only() {
    let spec = Spec { inline_max: 16, value_max: 1000, chunk: 1 << 14, ids: 4, lanes: 2, ..Spec::default() };
    let extent = Extent { key: Key::new(1, 1), at: 1 << 20, len: 1 << 18 };
    let parameters = serde_json::to_string(&spec).expect("plain data");
    let layout = Layout::new(&parameters, &[(NodeId(0), extent)]).expect("it is possible");
    let (leaf, chunk) = (spec.leaf_class(8), Chunk { member: 0, number: 2 });
    for len in [17_usize, 64, 65, 1000] {
        let value = vec![7; len];
        let class = spec.value_class(len as u32);
        assert!(class.size() >= len as u64 && (class.size() < 2 * len as u64 || len < 64), "{len}");
        let pointer = Pointer::new(layout.unit(chunk, class, 1), 77, &value);
        let mut bytes = Vec::new();
        leaf_bytes(leaf, (0, 5), (&[1; 8], Content::Apart(pointer)), LockWord::FREE, &mut bytes);
        assert!(matches!(leaf_of(&spec, 5, &bytes), Ok(Leaf::Whole(_))));
        let found = pointer_of(&bytes).expect("the value lies apart");
        assert_eq!((found, layout.class_of(&found)), (pointer, Ok(class)));
        assert!(found.check(&value).is_ok());
        assert!(found.check(&value[1..]).is_err() && found.check(&vec![8; len]).is_err());
        let elsewhere = Pointer::new(layout.unit(chunk, class, 1).plus(8), 77, &value);
        assert!(layout.class_of(&elsewhere).is_err());
    }
    let short = Pointer::new(layout.unit(chunk, spec.value_class(16), 0), 0, &[7; 16]);
    assert!(layout.class_of(&short).is_err(), "it would lie in the leaf");
    let mut bytes = Vec::new();
    leaf_bytes(leaf, (0, 5), (&[1; 8], Content::Value(&[1; 16])), LockWord::FREE, &mut bytes);
    assert_eq!((pointer_of(&bytes), value_of(&bytes)), (None, &[1; 16][..]));
}

#[cfg(farside_mutants)]
#[test]
fn a_checksum_that_does_not_cover_the_key_is_noticed() {
    use super::mutants::CHECKSUM_WITHOUT_KEY;
    use farside_remote::mutant::Mutant;
    let layout = layout(Keys::Strings);
    let class = layout.spec.leaf_class(4);
    let is_noticed = || {
        let mut bytes = Vec::new();
        leaf_bytes(class, (0, 0), (b"key\0", Content::Value(b"value")), LockWord::FREE, &mut bytes);
        bytes[24] ^= 1;
        matches!(leaf_of(&layout.spec, 0, &bytes), Ok(Leaf::Torn(_)))
    };
    assert!(is_noticed());
    Mutant::switch(Some(CHECKSUM_WITHOUT_KEY));
    let is_noticed_by_mutant = is_noticed();
    Mutant::switch(None);
    assert!(!is_noticed_by_mutant, "the mutant lives");
}

#[test]
fn a_copied_node_is_decoded_as_it_was_encoded() {
    let spec = Spec { chunk: 1 << 14, ids: 4, lanes: 2, ..Spec::of(Growth::Copied) };
    let extent = Extent { key: Key::new(1, 1), at: 1 << 20, len: 1 << 18 };
    let parameters = serde_json::to_string(&spec).expect("plain data");
    let layout = Layout::new(&parameters, &[(NodeId(0), extent)]).expect("it is possible");
    for (kind, size) in NodeType::COPIED.into_iter().zip([64, 192, 448, 2112]) {
        assert_eq!(kind.class().size(), size);
        let unit = layout.unit(Chunk { member: 0, number: 3 }, kind.class(), 1);
        let slot = layout.copied_slot(9, (unit, kind), 0x1_0801);
        assert_eq!(layout.view(slot), Ok(View::Node { at: unit, kind, generation: 1 }));
        let frozen = Slot(slot.0 | FROZEN_MASK);
        assert_eq!(layout.view(frozen), layout.view(slot));
        assert!(frozen.is_same_place(slot) && frozen.is_frozen() && frozen.thawed() == slot);
        let mut bytes = Vec::new();
        let header = Header::new(3, kind, b"abc");
        copied_bytes(0x1_0801, header, &[slot, Slot::empty(7)], &mut bytes);
        assert_eq!(bytes.len() as u64, size);
        let view = NodeView::of(&bytes[..kind.read_len() as usize]).expect("it is long enough");
        assert!(view.is_of(1) && !view.is_of(2) && !view.is_frozen());
        assert_eq!((view.generation(), view.header()), (0x1_0801, Ok(header)));
        let slots: Vec<Slot> = view.slots().filter(|slot| !slot.is_null()).collect();
        assert_eq!((slots, view.slots().count()), (vec![slot, Slot::empty(7)], kind.slots()));
        bytes[16..24].copy_from_slice(&frozen.0.to_le_bytes());
        bytes[..8].copy_from_slice(&(0x1_0801 | FROZEN_NODE_MASK).to_le_bytes());
        let view = NodeView::of(&bytes).expect("it is long enough");
        assert!(view.is_frozen() && view.is_of(1) && view.generation() == 0x1_0801);
        assert_eq!(view.slots().next(), Some(slot));
        // The lock is the last word, and the record of the lock names the node.
        let object = layout.object(unit, kind.class()).expect("a node");
        assert_eq!(layout.unit_of_object(0, object.at.raw(), object.len.into()), Some((unit, kind.class())));
        let claim = Claim { owner: ClientId::new(3).expect("not 0"), class: kind.class() };
        assert_eq!(Claim::of(claim.word()), Ok(Some(claim)));
    }
    let copied = NodeType::copied_for;
    assert_eq!([1, 4, 5, 16, 17, 48, 49, 256].map(|count| copied(count).map(NodeType::slots)), {
        [4, 4, 16, 16, 48, 48, 256, 256].map(Some)
    });
    assert_eq!(copied(257), None);
}

#[test]
fn a_store_has_the_nodes_of_its_kind() {
    let of_smart = serde_json::to_string(&Spec::default()).expect("plain data");
    let of_art = serde_json::to_string(&Spec::of(Growth::Copied)).expect("plain data");
    let plan = |nodes, parameters| super::store::plan("k", nodes, parameters, 64 << 20).map(drop);
    assert_eq!(plan(Growth::Switched, &of_smart), Ok(()));
    assert_eq!(plan(Growth::Copied, &of_art), Ok(()));
    let refused = plan(Growth::Copied, &of_smart);
    assert!(refused.as_ref().is_err_and(|why| why.contains("another kind")), "{refused:?}");
    let slot = Slot(FROZEN_MASK | 1);
    assert!(layout(Keys::Numbers).view(slot).is_err(), "switched nodes are never frozen");
}
