//! Datagram sessions over UDP. Each client and each engine has one socket. The system distributes clients to engines by
//! the clients' addresses.
//!
//! On loopback a datagram is large and holds the requests of many tasks, so one system call sends them all. On a
//! network a datagram fits in the path's MTU, and one system call sends or receives many datagrams by the system's
//! segmentation (GSO, GRO).
//!
//! If node and client share a token, [`seal`] prevents others on the path from reading, changing or forging datagrams
//! ([0015](../../../../docs/decisions/0015-sealed-datagrams.md)). Without a token, anyone on the path can do all of
//! that.

mod line;
mod port;
pub mod seal;

pub use line::UdpLine;
pub use port::{UdpAddress, UdpPort};

use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSocketState};
use std::io::{ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};

/// Maximum size in bytes of a datagram on loopback. Larger ones are slower, because one side idles while the other
/// handles the whole datagram.
const LOOPBACK_MAX: usize = 24 * 1024;
/// Size in bytes of the headers of a datagram: IPv6 (larger than IPv4) and UDP.
const HEADERS: usize = 40 + 8;
/// Size requested for the socket's receive buffer, in bytes.
pub const INBOUND_BYTES: usize = 4 << 20;
/// Maximum number of bytes per segmented send.
const SEGMENTED_MAX: usize = 60 * 1024;

/// A UDP socket, with the system's segmentation unless it is on loopback.
struct Socket {
    udp: UdpSocket,
    segmentation: Option<Box<Segmentation>>,
    /// Buffer for a datagram that is sent alone.
    out: Vec<u8>,
}

struct Segmentation {
    state: UdpSocketState,
    /// Queued datagrams to one address, which all have one size except the last.
    out: Vec<u8>,
    segment: usize,
    to: Option<SocketAddr>,
    inbound: Vec<u8>,
}

/// Returns how many datagrams one system call sends (GSO) and receives (GRO) at most on a network. A number is 1 if the
/// system does not support it. Sends nothing.
///
/// # Errors
/// The system's error: no such socket can be created.
pub fn segments() -> std::io::Result<(usize, usize)> {
    let udp = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let state = UdpSocketState::new((&udp).into())?;
    Ok((state.max_gso_segments(), state.gro_segments()))
}

/// Size in bytes of the buffer for one receive.
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

    /// Returns the size in bytes of the socket's receive buffer, including the system's overhead.
    fn inbound_bytes(&self) -> usize {
        rustix::net::sockopt::socket_recv_buffer_size(&self.udp).unwrap_or(PLACE)
    }

    /// Queues a datagram to `to`, or to the connected address if `to` is absent. The datagram leaves on the next
    /// [`Socket::flush`], or earlier.
    fn send(&mut self, to: Option<SocketAddr>, datagram: &[u8]) -> std::io::Result<()> {
        match self.segmentation {
            Some(_) => self.write(to, datagram.len(), |out| out.extend_from_slice(datagram)),
            None => send_one(&self.udp, to, datagram),
        }
    }

    /// Queues a datagram like [`Socket::send`]: `write` appends its `len` bytes to the buffer.
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
        // In one segmented send all datagrams have the same size, except a shorter last one.
        let goes_along = *before == to
            && len <= *segment
            && out.len().is_multiple_of(*segment)
            && out.len() + len <= SEGMENTED_MAX;
        let flushed = if out.is_empty() || goes_along { Ok(()) } else { self.flush() };
        let Some(Segmentation { out, segment, to: before, .. }) = self.segmentation.as_deref_mut() else {
            unreachable!("segmentation does not change")
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

    /// Passes received datagrams to `take`, at most one batch. `buffer` has [`PLACE`] bytes.
    fn receive(
        &mut self,
        buffer: &mut [u8],
        mut take: impl FnMut(SocketAddr, &mut [u8]),
    ) -> std::io::Result<bool> {
        let Some(segmentation) = &mut self.segmentation else {
            // On loopback one datagram is received per call: it holds the requests of many tasks, and the peer waits
            // for the responses.
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
        let mut slices: [IoSliceMut<'_>; BATCH_SIZE] = std::array::from_fn(|_| {
            IoSliceMut::new(places.next().expect("a slot for each datagram of a batch"))
        });
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

/// Returns success if the error only means that nothing was received, and otherwise the error.
fn nothing_more(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Requests a larger receive buffer than the default. If the system grants less, bursts lose datagrams, which are
/// retransmitted.
fn grow_inbound(udp: &UdpSocket) {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
    if set_socket_recv_buffer_size_force(udp, INBOUND_BYTES).is_err() {
        let _as_much_as_is_allowed = set_socket_recv_buffer_size(udp, INBOUND_BYTES);
    }
}

/// Returns random bytes from the system, which nobody can predict.
fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(drawn, Ok(bytes.len()), "the system provides random bytes for keys");
    bytes
}
