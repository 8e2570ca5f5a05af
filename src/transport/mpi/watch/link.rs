//! The connection of two neighbours in the ring, and what is said over it.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use rustix::net::sockopt;

use super::card::Card;
use crate::transport::Loss;

/// How long one address of a rank is tried.
pub(super) const CONNECT: Duration = Duration::from_secs(2);
/// How long a peer may take over a message that has begun.
const PATIENCE: Duration = Duration::from_millis(500);
/// A silent connection is asked by the kernel after so long, so often, and so many times: a node without power is noticed in 7 s.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(4), Duration::from_secs(1), 3);
/// The longest text that is taken from a peer.
const TEXT: usize = 4096;

/// What the watched rank tells its watcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Word {
    /// It is the rank that was meant.
    Welcome,
    /// It has come to its end, and won't be missed.
    Goodbye,
    /// Another rank is lost.
    Lost(Loss),
}

impl Word {
    /// Says it.
    pub(super) fn write(&self, mut stream: &TcpStream) -> Result<()> {
        let bytes = match self {
            Word::Welcome => vec![b'W'],
            Word::Goodbye => vec![b'G'],
            Word::Lost(loss) => {
                let text = &loss.text.as_bytes()[..loss.text.len().min(TEXT)];
                let kind = if loss.died { b'D' } else { b'A' };
                let (hops, length) = (loss.hops.to_le_bytes(), (text.len() as u32).to_le_bytes());
                [&[kind][..], &hops, &length, text].concat()
            }
        };
        stream.write_all(&bytes)
    }

    /// Hears one.
    pub(super) fn read(mut stream: &TcpStream) -> Result<Word> {
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        match kind[0] {
            b'W' => Ok(Word::Welcome),
            b'G' => Ok(Word::Goodbye),
            kind @ (b'A' | b'D') => {
                let mut number = || -> Result<u32> {
                    let mut bytes = [0; 4];
                    stream.read_exact(&mut bytes)?;
                    Ok(u32::from_le_bytes(bytes))
                };
                let (hops, length) = (number()?, number()? as usize);
                let mut text = vec![0; length.min(TEXT)];
                stream.read_exact(&mut text)?;
                Ok(Word::Lost(Loss {
                    text: String::from_utf8_lossy(&text).into_owned(),
                    died: kind == b'D',
                    hops,
                }))
            }
            _ => Err(Error::from(ErrorKind::InvalidData)),
        }
    }
}

/// What the watcher says when it comes to its own end: it needs no goodbye.
pub(super) const NO_NEED: u8 = b'N';

/// Connects to the rank of a card, as its watcher. The rank says [`Word::Welcome`] when it gets to it.
pub(super) fn connect(card: &Card, own: &Card) -> Result<TcpStream> {
    let near = card.is_near(own).then_some(SocketAddr::from((Ipv4Addr::LOCALHOST, card.port)));
    let named = || (card.host.as_str(), card.port).to_socket_addrs().into_iter().flatten();
    let mut error = Error::new(ErrorKind::NotFound, format!("no address of {} is known here", card.host));
    for address in near.into_iter().chain(std::iter::once_with(named).flatten()) {
        match greet(address, card) {
            Ok(stream) => return Ok(stream),
            Err(e) => error = Error::new(e.kind(), format!("{address}: {e}")),
        }
    }
    Err(error)
}

fn greet(address: SocketAddr, card: &Card) -> Result<TcpStream> {
    let stream = prepared(TcpStream::connect_timeout(&address, CONNECT)?)?;
    // A port of one's own may be chosen for both ends, and the connection be one with itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(Error::from(ErrorKind::ConnectionRefused));
    }
    (&stream).write_all(&card.key)?;
    Ok(stream)
}

/// Listens for the watcher.
pub(super) fn listen() -> Result<TcpListener> {
    let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Takes one connection, if whoever made it knows the key.
pub(super) fn accept(listener: &TcpListener, card: &Card) -> Result<TcpStream> {
    let stream = listener.accept()?.0;
    stream.set_nonblocking(false)?;
    let stream = prepared(stream)?;
    let mut key = [0; 16];
    (&stream).read_exact(&mut key)?;
    if key != card.key {
        return Err(Error::from(ErrorKind::PermissionDenied));
    }
    Word::Welcome.write(&stream)?;
    Ok(stream)
}

/// With the settings of all of these connections.
pub(super) fn prepared(stream: TcpStream) -> Result<TcpStream> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    let (idle, interval, count) = KEEPALIVE;
    sockopt::set_tcp_keepidle(&stream, idle)?;
    sockopt::set_tcp_keepintvl(&stream, interval)?;
    sockopt::set_tcp_keepcnt(&stream, count)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = listen().unwrap();
        let card = Card::own(listener.local_addr().unwrap().port());
        let stream = connect(&card, &Card::own(0)).unwrap();
        (stream, accept(&listener, &card).unwrap())
    }

    #[test]
    fn words_arrive_as_they_were_said() {
        let (watcher, watched) = pair();
        let lost = Word::Lost(Loss {
            text: "rank 3 on näh has died".into(),
            died: true,
            hops: 70_000,
        });
        for word in [Word::Goodbye, lost] {
            word.write(&watched).unwrap();
        }
        assert_eq!(Word::read(&watcher).unwrap(), Word::Welcome);
        assert_eq!(Word::read(&watcher).unwrap(), Word::Goodbye);
        assert!(matches!(Word::read(&watcher).unwrap(), Word::Lost(loss) if loss.died && loss.hops == 70_000 && loss.text.contains("näh")));
        drop(watched);
        assert!(Word::read(&watcher).is_err());
    }

    #[test]
    fn strangers_are_turned_away() {
        let listener = listen().unwrap();
        let card = Card::own(listener.local_addr().unwrap().port());
        let stranger = connect(
            &Card {
                key: [7; 16],
                ..card.clone()
            },
            &card,
        )
        .unwrap();
        assert_eq!(accept(&listener, &card).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert!(Word::read(&stranger).is_err());
        // Longer than any text, and not a word at all.
        for bytes in [&b"D\0\0\0\0\xff\xff\xff\xff text"[..], b"?"] {
            let (watcher, mut watched) = pair();
            assert_eq!(Word::read(&watcher).unwrap(), Word::Welcome);
            watched.write_all(bytes).unwrap();
            drop(watched);
            assert!(Word::read(&watcher).is_err());
        }
        drop(listener);
        assert!(connect(&card, &card).is_err());
    }
}
