//! Datagram sessions over UDP sockets: a client has one, each engine has one, and the system deals clients out to
//! engines by their addresses.
//!
//! On loopback a datagram is large and holds what many tasks ask: one call of the system for all of them. Elsewhere
//! it fits the path's frames, and many leave and arrive together by the system's segmentation (GSO, GRO). Where node
//! and client share a token, [`seal`] keeps others from reading, changing and making datagrams
//! ([0015](../../../../docs/decisions/0015-sealed-datagrams.md)); else whoever can see them can do so.

mod line;
mod port;
pub mod seal;

pub use line::UdpLine;
pub use port::{UdpAddress, UdpPort};

use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSocketState};
use std::io::{ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};

/// The most bytes of a datagram that stays on this machine. Larger ones are slower: neither side has anything to do
/// while the other works on all of it.
const LOOPBACK_MAX: usize = 24 * 1024;
/// Bytes of headers before a datagram's own: of IPv6, which are more, and of UDP.
const HEADERS: usize = 40 + 8;
/// Bytes that are asked of the system for what has arrived.
pub const INBOUND_BYTES: usize = 4 << 20;
/// The most bytes that leave together.
const SEGMENTED_MAX: usize = 60 * 1024;

/// A socket, with the system's segmentation where datagrams cross a network.
struct Socket {
    udp: UdpSocket,
    segmentation: Option<Box<Segmentation>>,
    /// Where a datagram is written that leaves alone.
    out: Vec<u8>,
}

struct Segmentation {
    state: UdpSocketState,
    /// Datagrams of one size, but for the last, to one address.
    out: Vec<u8>,
    segment: usize,
    to: Option<SocketAddr>,
    inbound: Vec<u8>,
}

/// How many datagrams the system sends, and receives, by one call where they cross a network (GSO, GRO); 1 where it
/// cannot. Asks the system; sends nothing.
///
/// # Errors
/// The system's: there is no such socket.
pub fn segments() -> std::io::Result<(usize, usize)> {
    let udp = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let state = UdpSocketState::new((&udp).into())?;
    Ok((state.max_gso_segments(), state.gro_segments()))
}

/// Bytes of one place for what arrives.
const PLACE: usize = 64 * 1024;

impl Socket {
    fn new(udp: UdpSocket) -> std::io::Result<Socket> {
        udp.set_nonblocking(true)?;
        grow_inbound(&udp);
        let segmentation = match udp.local_addr()?.ip().is_loopback() {
            true => None,
            false => Some(Box::new(Segmentation {
                state: UdpSocketState::new((&udp).into())?,
                out: Vec::new(),
                segment: 0,
                to: None,
                inbound: vec![0; PLACE * BATCH_SIZE],
            })),
        };
        Ok(Socket { udp, segmentation, out: Vec::new() })
    }

    /// How many bytes of datagrams the system holds, with what it needs for itself.
    fn inbound_bytes(&self) -> usize {
        rustix::net::sockopt::socket_recv_buffer_size(&self.udp).unwrap_or(PLACE)
    }

    /// Sends a datagram, now or by the next [`Socket::flush`]. To `to`, or to whom the socket is connected.
    fn send(&mut self, to: Option<SocketAddr>, datagram: &[u8]) -> std::io::Result<()> {
        match self.segmentation {
            Some(_) => self.write(to, datagram.len(), |out| out.extend_from_slice(datagram)),
            None => send_one(&self.udp, to, datagram),
        }
    }

    /// Sends a datagram of `len` bytes, which `write` appends to what leaves.
    fn write(
        &mut self,
        to: Option<SocketAddr>,
        len: usize,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> std::io::Result<()> {
        let Some(segmentation) = &mut self.segmentation else {
            self.out.clear();
            write(&mut self.out);
            return send_one(&self.udp, to, &self.out);
        };
        let Segmentation { out, segment, to: before, .. } = &mut **segmentation;
        // A shorter one ends what leaves together.
        let goes_along = *before == to
            && len <= *segment
            && out.len().is_multiple_of(*segment)
            && out.len() + len <= SEGMENTED_MAX;
        let flushed = if out.is_empty() || goes_along { Ok(()) } else { self.flush() };
        let Some(Segmentation { out, segment, to: before, .. }) = self.segmentation.as_deref_mut() else {
            unreachable!("it has segmentation, as before")
        };
        if out.is_empty() {
            (*segment, *before) = (len, to);
        }
        write(out);
        flushed
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let Some(segmentation) = &mut self.segmentation else { return Ok(()) };
        let Segmentation { state, out, segment, to, .. } = &mut **segmentation;
        let together = state.max_gso_segments().max(1) * *segment;
        let mut sent = Ok(());
        for contents in out.chunks(together.max(1)) {
            sent = match (*to, contents.len() > *segment) {
                (Some(destination), true) => state.try_send(
                    (&self.udp).into(),
                    &Transmit {
                        destination,
                        ecn: None,
                        contents,
                        segment_size: Some(*segment),
                        src_ip: None,
                    },
                ),
                (to, _) => contents.chunks(*segment).try_for_each(|one| send_one(&self.udp, to, one)),
            };
            if sent.is_err() {
                break;
            }
        }
        out.clear();
        sent
    }

    /// Hands on what has arrived: at most a batch. `buffer` has [`PLACE`] bytes.
    fn receive(
        &mut self,
        buffer: &mut [u8],
        mut take: impl FnMut(SocketAddr, &mut [u8]),
    ) -> std::io::Result<bool> {
        let Some(segmentation) = &mut self.segmentation else {
            // One at a time: it holds what many tasks asked, and the other side waits for what comes of it.
            return match self.udp.recv_from(buffer) {
                Ok((len, from)) => {
                    take(from, &mut buffer[..len]);
                    Ok(true)
                }
                Err(error) => nothing_more(error).map(|()| false),
            };
        };
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut places = segmentation.inbound.chunks_mut(PLACE);
        let mut slices: [IoSliceMut<'_>; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(places.next().expect("a place for each of a batch")));
        let count = match segmentation.state.recv((&self.udp).into(), &mut slices, &mut metas) {
            Ok(count) => count,
            Err(error) => return nothing_more(error).map(|()| false),
        };
        for (meta, slice) in metas.iter().zip(&mut slices).take(count) {
            for datagram in slice[..meta.len].chunks_mut(meta.stride.max(1)) {
                take(meta.addr, datagram);
            }
        }
        Ok(count > 0)
    }
}

fn send_one(udp: &UdpSocket, to: Option<SocketAddr>, datagram: &[u8]) -> std::io::Result<()> {
    match to {
        Some(to) => udp.send_to(datagram, to),
        None => udp.send(datagram),
    }
    .map(drop)
}

/// Nothing has arrived, which is no error.
fn nothing_more(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Asks for more room than sockets have by themselves; what the system does not give is lost in bursts, and asked
/// for again.
fn grow_inbound(udp: &UdpSocket) {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
    if set_socket_recv_buffer_size_force(udp, INBOUND_BYTES).is_err() {
        let _as_much_as_is_allowed = set_socket_recv_buffer_size(udp, INBOUND_BYTES);
    }
}

/// Random bytes, of which nobody can know or guess any.
fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(drawn, Ok(bytes.len()), "the system has random bytes: keys must not be guessed");
    bytes
}
