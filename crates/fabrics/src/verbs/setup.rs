//! The set-up of a connection: the client's and the node's description of their queue pairs, exchanged over TCP.
//!
//! The TCP connection then stays open as long as the queue pairs are used, so that each side learns at once when the
//! other side's process has ended. It carries nothing else.
//!
//! A description is `| magic 8 | version u8 | kind u8 | mtu u8 | reads u8 | pair u32 | first u32 | frame u32 | flags
//! u32 | lid u16 | 0 u16 | gid 16 |`. A refusal has the reason's length as its pair and is followed by the reason.
//!
//! Invariant: received bytes are checked whole before any of them is used.

use super::device::{self, Atomics, Device};
use super::error::VerbsError;
use super::resources::{Context, End, Way};
use std::net::IpAddr;
use std::sync::Arc;

/// Size of a description in bytes.
pub(super) const SIZE: usize = 48;
/// Maximum size of the reason of a refusal.
pub(super) const REASON_MAX: usize = 512;
/// Maximum size of a frame in bytes.
pub(super) const FRAME_MAX: usize = 8192;
/// Smallest maximum of a frame that a peer may have: a session needs datagrams of this size.
const FRAME_MIN: usize = crate::session::DATAGRAM_MIN;
/// Maximum number of READs and atomics that a queue pair executes at a time.
const READS_MAX: u32 = 16;
/// Default port of a node.
pub const PORT: u16 = 7460;

const MAGIC: [u8; 8] = *b"farsideV";
const VERSION: u8 = 1;
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REFUSAL: u8 = 3;
/// Mask of a queue pair's number and of a packet number.
const U24: u32 = 0xff_ffff;

/// Flag: the node's NIC executes the atomics of all regions, and its engines execute none.
const NIC_ATOMICS: u32 = 1;
/// Flag: the node's NIC reads and writes aligned lines as a whole.
const WHOLE_LINES: u32 = 2;

/// How a device, its identifier and its packets are chosen. Without a value, the choice is automatic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Name of the device.
    pub device: Option<String>,
    /// Index of the port's identifier (GID).
    pub gid: Option<u32>,
    /// Size of packets in bytes.
    pub mtu: Option<u32>,
}

impl Choice {
    /// Parses the part of a url after its `?`, such as `device=rxe0&gid=1&mtu=1024`.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn parse(query: &str) -> Result<Choice, String> {
        let mut choice = Choice::default();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let number = || value.parse().map_err(|_| format!("'{name}' takes a number, not '{value}'"));
            match name {
                "device" if !value.is_empty() => choice.device = Some(value.to_owned()),
                "gid" => choice.gid = Some(number()?),
                "mtu" => choice.mtu = Some(number()?),
                _ => {
                    return Err(format!(
                        "'{part}' is not understood: give device=NAME, gid=INDEX or mtu=BYTES"
                    ));
                }
            }
        }
        Ok(choice)
    }
}

/// Prints the choice as the end of a url, with its `?`.
impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.device.as_ref().map(|device| format!("device={device}"));
        let gid = self.gid.map(|gid| format!("gid={gid}"));
        let mtu = self.mtu.map(|mtu| format!("mtu={mtu}"));
        let mut before = '?';
        for part in [device, gid, mtu].into_iter().flatten() {
            write!(f, "{before}{part}")?;
            before = '&';
        }
        Ok(())
    }
}

/// A port of this machine's devices, open and ready for queue pairs.
pub(super) struct Here {
    pub(super) context: Arc<Context>,
    pub(super) device: Device,
    pub(super) way: Way,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// IP address of the port, if it has one.
    pub(super) address: Option<IpAddr>,
    /// Number of READs and atomics that a queue pair executes at a time.
    pub(super) reads: u8,
}

impl Here {
    /// Opens the device that `choice` names, or else the one that has the address `local`.
    pub(super) fn open(choice: &Choice, local: Option<IpAddr>) -> Result<Here, VerbsError> {
        let devices = device::devices()?;
        let device = choose(&devices, choice.device.as_deref(), local)?.clone();
        let unusable = VerbsError::Unusable;
        let has_local =
            |port: &&device::Port| port.gids.iter().any(|gid| gid.address == local && local.is_some());
        let number = device.ports.iter().find(has_local).map(|port| port.number);
        let port = device.port(number).map_err(unusable)?;
        let of_local = || port.gids.iter().find(|gid| gid.roce_v2 && gid.address == local && local.is_some());
        let gid = match choice.gid.is_none().then(of_local).flatten() {
            Some(gid) => gid,
            None => port.gid(choice.gid).map_err(unusable)?,
        };
        let gid_index =
            u8::try_from(gid.index).map_err(|_| unusable(format!("GID {} is too high", gid.index)))?;
        let wanted = choice.mtu.unwrap_or(port.mtu);
        let mtu = mtu_code(wanted).filter(|_| wanted <= port.mtu).ok_or(VerbsError::Mtu(wanted, port.mtu))?;
        let is_global = port.link_ethernet || choice.gid.is_some();
        let way = Way { port: port.number, gid_index, is_global, mtu };
        let reads = device.limits.max_qp_rd_atom.clamp(1, READS_MAX) as u8;
        let (lid, gid, address) = (port.lid, gid.bytes, gid.address);
        Ok(Here { context: Context::open(&device.name)?, way, lid, gid, address, reads, device })
    }

    /// Describes a pair of this port, which sends its first packet with the number `first`.
    pub(super) fn end(&self, pair: u32, first: u32) -> End {
        End { pair, first, lid: self.lid, gid: self.gid, reads: self.reads }
    }

    /// Whether the device has 8-byte atomics.
    pub(super) fn has_atomics(&self) -> bool {
        self.device.atomics != Atomics::None
    }
}

/// Draws a number for a queue pair's first packet.
pub(super) fn first_packet() -> u32 {
    let mut bytes = [0; 4];
    // If the system has no random bytes now, the number 0 is as good: it need not be secret.
    let _drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    u32::from_le_bytes(bytes) & U24
}

/// Chooses a device: the one called `name`, or else the one with the address `local`, or else the only one.
fn choose<'a>(
    devices: &'a [Device],
    name: Option<&str>,
    local: Option<IpAddr>,
) -> Result<&'a Device, VerbsError> {
    let names = || devices.iter().map(|device| device.name.clone()).collect();
    if let Some(name) = name {
        let named = devices.iter().find(|device| device.name == name);
        return named.ok_or_else(|| VerbsError::NoSuchDevice(name.to_owned(), names()));
    }
    let has = |device: &&Device| {
        device.ports.iter().flat_map(|port| &port.gids).any(|gid| gid.address == local && local.is_some())
    };
    match (devices.iter().find(has), devices, local) {
        (Some(device), _, _) | (None, [device], _) => Ok(device),
        (None, _, Some(local)) => Err(VerbsError::NoDeviceAt(local, names())),
        (None, _, None) => Err(VerbsError::NoSuchDevice(String::new(), names())),
    }
}

/// Returns the code of a packet size in bytes.
fn mtu_code(bytes: u32) -> Option<u8> {
    [256, 512, 1024, 2048, 4096].iter().position(|&size| size == bytes).map(|code| code as u8 + 1)
}

/// What one side tells the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) end: End,
    /// Code of the packet size.
    pub(super) mtu: u8,
    /// Maximum size of a frame that this side receives.
    pub(super) frame: u32,
    /// How the node executes atomics. A client's is the default.
    pub(super) abilities: Abilities,
}

/// What a node's NIC does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Whether the NIC executes the atomics of all regions, and engines none.
    pub(super) nic_atomics: bool,
    /// Whether the NIC reads and writes aligned lines as a whole.
    pub(super) whole_lines: bool,
}

impl Abilities {
    /// Whether the NIC executes chains.
    ///
    /// Software that runs chains promises that no aligned unit of 16 bytes is torn. A device that does not read and
    /// write whole lines does not keep that promise, so engines execute all chains, unless the user has chosen the NIC.
    pub(super) fn has_lists(self) -> bool {
        self.nic_atomics || self.whole_lines
    }
}

/// A received message of the set-up.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    Hello(Description),
    Welcome(Description),
    /// A refusal, whose reason has this number of bytes.
    Refusal(usize),
}

impl Message {
    /// Decodes a message. The bytes are untrusted input.
    pub(super) fn decode(bytes: &[u8; SIZE]) -> Result<Message, String> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if bytes[..8] != MAGIC {
            return Err("it speaks another protocol".to_owned());
        }
        if bytes[8] != VERSION {
            return Err(format!("it has version {} of the set-up, this program has {VERSION}", bytes[8]));
        }
        let (kind, mtu, reads) = (bytes[9], bytes[10], bytes[11]);
        let (pair, first, frame, flags) = (word(12), word(16), word(20), word(24));
        if kind == REFUSAL {
            let len = pair as usize;
            return if len <= REASON_MAX {
                Ok(Message::Refusal(len))
            } else {
                Err("its refusal is too long".into())
            };
        }
        let gid = bytes[32..48].try_into().expect("sixteen bytes");
        let end = End { pair, first, lid: u16::from_le_bytes([bytes[28], bytes[29]]), gid, reads };
        check(&end)?;
        if mtu_code(128 << mtu.min(6)) != Some(mtu) {
            return Err(format!("the code {mtu} is no size of packets"));
        }
        if !(FRAME_MIN..=FRAME_MAX).contains(&(frame as usize)) {
            return Err(format!("frames of {frame} bytes are not possible"));
        }
        if flags & !(NIC_ATOMICS | WHOLE_LINES) != 0 || bytes[30..32] != [0; 2] {
            return Err("it has unknown flags".to_owned());
        }
        let abilities =
            Abilities { nic_atomics: flags & NIC_ATOMICS != 0, whole_lines: flags & WHOLE_LINES != 0 };
        let description = Description { end, mtu, frame, abilities };
        match kind {
            HELLO => Ok(Message::Hello(description)),
            WELCOME => Ok(Message::Welcome(description)),
            _ => Err(format!("its message is of the unknown kind {kind}")),
        }
    }

    /// Encodes the message, without the reason of a refusal.
    pub(super) fn encode(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let (kind, of) = match self {
            Message::Hello(of) => (HELLO, of),
            Message::Welcome(of) => (WELCOME, of),
            Message::Refusal(len) => {
                put(9, &[REFUSAL]);
                put(12, &(*len as u32).to_le_bytes());
                return bytes;
            }
        };
        let Description { end, mtu, frame, abilities } = of;
        let flags = if abilities.nic_atomics { NIC_ATOMICS } else { 0 }
            | if abilities.whole_lines { WHOLE_LINES } else { 0 };
        put(9, &[kind, *mtu, end.reads]);
        put(12, &end.pair.to_le_bytes());
        put(16, &end.first.to_le_bytes());
        put(20, &frame.to_le_bytes());
        put(24, &flags.to_le_bytes());
        put(28, &end.lid.to_le_bytes());
        put(32, &end.gid);
        bytes
    }
}

/// Checks that a queue pair can have this description.
pub(super) fn check(end: &End) -> Result<(), String> {
    if end.pair == 0 || end.pair > U24 || end.first > U24 {
        return Err("the number of its queue pair or packet is not possible".to_owned());
    }
    if end.reads == 0 || u32::from(end.reads) > READS_MAX {
        return Err(format!("{} READs at a time are not possible", end.reads));
    }
    Ok(())
}

/// Encodes a refusal with its reason, which is cut if it is too long.
pub(super) fn refusal(reason: &str) -> Vec<u8> {
    let cut = (0..=reason.len().min(REASON_MAX)).rev().find(|&at| reason.is_char_boundary(at)).unwrap_or(0);
    let mut bytes = Message::Refusal(cut).encode().to_vec();
    bytes.extend_from_slice(&reason.as_bytes()[..cut]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::fuzz::{self, Change, Executions};
    use crate::verbs::device::{Gid, Limits, Port};

    fn description() -> Description {
        let end = End { pair: 17, first: 0x123456, lid: 9, gid: [7; 16], reads: 16 };
        let abilities = Abilities { nic_atomics: true, whole_lines: false };
        Description { end, mtu: 3, frame: FRAME_MAX as u32, abilities }
    }

    #[test]
    fn messages_round_trip() {
        for message in [Message::Hello(description()), Message::Welcome(description()), Message::Refusal(9)] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
        let bytes = refusal(&"\u{e9}".repeat(400));
        assert_eq!(Message::decode(bytes.first_chunk().expect("a message")), Ok(Message::Refusal(512)));
        assert_eq!(bytes.len(), SIZE + 512);
    }

    #[test]
    fn a_peer_of_another_protocol_or_version_is_recognized() {
        let mut bytes = Message::Hello(description()).encode();
        bytes[8] = 9;
        assert!(Message::decode(&bytes).unwrap_err().contains("version 9"));
        bytes[0] ^= 1;
        assert!(Message::decode(&bytes).unwrap_err().contains("another protocol"));
    }

    #[test]
    fn a_device_is_chosen_by_name_or_by_its_address() {
        let limits = Limits {
            max_qp: 1,
            max_qp_wr: 1,
            max_sge: 1,
            max_cqe: 1,
            max_mr: 1,
            max_mr_size: 1,
            max_srq_wr: 1,
            max_qp_rd_atom: 1,
            max_qp_init_rd_atom: 1,
        };
        let device = |name: &str, address: &str| {
            let address: IpAddr = address.parse().expect("an address");
            let gid = Gid { index: 1, bytes: [0; 16], roce_v2: true, address: Some(address) };
            let port =
                Port { number: 1, active: true, link_ethernet: true, mtu: 1024, lid: 0, gids: vec![gid] };
            Device {
                name: name.into(),
                ports: vec![port],
                atomics: Atomics::Device,
                limits,
                is_software: true,
            }
        };
        let both = [device("a", "10.0.0.1"), device("b", "10.0.0.2")];
        let chosen = |name, local: Option<&str>| {
            let local = local.map(|local| local.parse().expect("an address"));
            choose(&both, name, local).map(|device| device.name.clone()).map_err(|error| error.to_string())
        };
        assert_eq!(chosen(Some("a"), Some("10.0.0.2")), Ok("a".into()));
        assert_eq!(chosen(None, Some("10.0.0.2")), Ok("b".into()));
        assert!(chosen(Some("c"), None).unwrap_err().contains("a, b"));
        assert!(chosen(None, Some("10.0.0.3")).unwrap_err().contains("?device=NAME"));
        assert_eq!(choose(&both[..1], None, None).map(|device| &*device.name).ok(), Some("a"));
    }

    #[test]
    fn choices_are_parsed_and_printed_alike() {
        for text in ["device=rxe0&gid=1&mtu=1024", "gid=0", "mtu=4096", ""] {
            let choice = Choice::parse(text).expect("a choice");
            let printed = choice.to_string();
            assert_eq!(printed.strip_prefix('?').unwrap_or(&printed), text);
        }
        for wrong in ["gid=x", "mtu", "device=", "speed=1"] {
            assert!(Choice::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// Decodes mutated messages: a decoded one encodes to the same bytes, and its numbers are within their limits.
    #[test]
    fn fuzz_set_up() {
        let executions = Executions::of("messages of the set-up");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(kind, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let message = match kind % 3 {
                0 => Message::Hello(description()),
                1 => Message::Welcome(description()),
                _ => Message::Refusal(kind.into()),
            };
            let mut bytes = message.encode().to_vec();
            fuzz::change(&mut bytes, &changes);
            let Some(bytes) = bytes.first_chunk() else { return };
            match Message::decode(bytes) {
                Ok(Message::Refusal(len)) => assert!(len <= REASON_MAX),
                Ok(message @ (Message::Hello(of) | Message::Welcome(of))) => {
                    assert_eq!(message.encode(), *bytes);
                    assert!((1..=5).contains(&of.mtu) && of.frame as usize <= FRAME_MAX);
                    assert!(of.end.pair <= U24 && (1..=16).contains(&of.end.reads));
                }
                Err(reason) => assert!(!reason.is_empty()),
            }
        });
    }
}
